"""The engine against the plain Hugging Face model, float32, tiny random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.model.engine import Engine, Slice
from tests.support.tiny_models import make_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "starcoder2": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def plain_logits(directory: Path, token_ids: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_chunked_rolled_back_logits_equal_the_plain_model(
    family: str, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family, **FAMILIES[family])
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 256, (14,), generator=generator).tolist()
    second = torch.randint(0, 256, (9,), generator=generator).tolist()
    engine = Engine.resident(Checkpoint.open(directory), kv_tokens=64, block_size=4)
    kv_first, kv_second = engine.cache.open(14), engine.cache.open(9)

    head = engine.forward(
        [
            Slice(kv=kv_first, token_ids=[*first[:8], 7, 7], num_logits=10),
            Slice(kv=kv_second, token_ids=second[:5], num_logits=5),
        ]
    )
    kv_first.truncate(8)  # the two 7s were a wrong guess
    tail = engine.forward(
        [
            Slice(kv=kv_second, token_ids=second[5:], num_logits=4),
            Slice(kv=kv_first, token_ids=first[8:], num_logits=6),
        ]
    )

    ours = torch.cat([head[0][:8], tail[1]])
    torch.testing.assert_close(ours, plain_logits(directory, first), atol=1e-5, rtol=0)
    ours = torch.cat([head[1], tail[0]])
    torch.testing.assert_close(ours, plain_logits(directory, second), atol=1e-5, rtol=0)


def test_only_the_wanted_logits_are_computed(tmp_path: Path) -> None:
    engine = Engine.resident(Checkpoint.open(make_tiny_model(tmp_path)), kv_tokens=64)
    kv = engine.cache.open(8)
    (logits,) = engine.forward([Slice(kv=kv, token_ids=[1, 2, 3], num_logits=0)])
    assert logits.shape == (0, engine.vocab_size)
    assert kv.length == 3


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointCorrupt, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        Decoder(Checkpoint.open(directory))


def test_a_tensor_of_another_shape_is_refused_by_its_name(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, path)
    with pytest.raises(CheckpointCorrupt, match=r"model\.norm\.weight has shape \[63\]"):
        Decoder(Checkpoint.open(directory))


def test_weights_of_a_type_that_cannot_be_computed_are_refused_at_the_start(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="I8 cannot be served yet: give a checkpoint in BF16"):
        Decoder(Checkpoint.open(directory))
