"""Every architecture against the plain Hugging Face model, float32, tiny random weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headrace.errors import ConfigError
from headrace.model.checkpoint import Checkpoint
from headrace.model.engine import Engine, Slice
from headrace.model.module import UnboundModule
from tests.support.tiny_models import ARCHITECTURES, make_tiny_model, split_into_shards

# Three branches of depth three below the last stored token; 10 tokens, the first two roots.
TREE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
PARENTS = [-1, -1, 0, 0, 1, 2, 3, 4, 5, 6]
KEPT = [0, 3, 6, 9]


def plain_model(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def open_engine(directory: Path) -> Engine:
    return Engine.resident(Checkpoint.open(directory), kv_tokens=64, block_size=4)


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.float()


def path_to(index: int) -> list[int]:
    """Tokens of the tree from its root to a node."""
    parent = PARENTS[index]
    return [*(path_to(parent) if parent >= 0 else []), TREE[index]]


def random_tokens(num_tokens: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 256, (num_tokens,), generator=generator).tolist()
    return tokens


def assert_same(ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_chunks_rollback_and_trees_in_a_ragged_batch_equal_the_plain_model(
    family: str, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family)
    model, engine = plain_model(directory), open_engine(directory)
    first, second = random_tokens(14, seed=3), random_tokens(19, seed=4)
    kv_first, kv_second = engine.cache.open(20), engine.cache.open(30)

    head = engine.forward(
        [
            Slice(kv=kv_first, token_ids=[*first[:8], 7, 7], num_logits=10),
            Slice(kv=kv_second, token_ids=second[:5], num_logits=5),
        ]
    )
    kv_first.truncate(8)  # the two 7s were a wrong guess
    middle = engine.forward(
        [
            Slice(kv=kv_second, token_ids=second[5:13], num_logits=8),
            Slice(kv=kv_first, token_ids=first[8:], num_logits=6),
        ]
    )
    assert_same(torch.cat([head[0][:8], middle[1]]), plain_logits(model, first))

    chain, tree = engine.forward(
        [
            Slice(kv=kv_first, token_ids=[1, 2], num_logits=2),
            Slice(kv=kv_second, token_ids=TREE, num_logits=len(TREE), parents=PARENTS),
        ]
    )
    assert_same(chain, plain_logits(model, [*first, 1, 2])[-2:])
    for index, logits in enumerate(tree):
        assert_same(logits, plain_logits(model, second[:13] + path_to(index))[-1])

    kv_second.keep(KEPT)
    second = [*second[:13], *path_to(KEPT[-1]), *second[13:]]
    (after,) = engine.forward([Slice(kv=kv_second, token_ids=second[17:], num_logits=6)])
    assert_same(torch.cat([head[1], middle[0]]), plain_logits(model, second)[:13])
    assert_same(after, plain_logits(model, second)[-6:])
    (last,) = engine.forward([Slice(kv=kv_second, token_ids=[5], num_logits=1)])
    assert_same(last, plain_logits(model, [*second, 5])[-1:])


LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 4 for i in range(8)],
        "long_factor": [4.0] * 8,
    },
}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"parallel_attn": False, "bias": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("phi3", {"sliding_window": 6}),
    ("phi3", LONGROPE),
    ("cohere", {"use_qk_norm": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_variants_of_an_architecture_equal_the_plain_model(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family, **options)
    engine = open_engine(directory)
    tokens = random_tokens(14, seed=5)
    kv, other = engine.cache.open(14), engine.cache.open(14)
    head, _ = engine.forward(
        [
            Slice(kv=kv, token_ids=tokens[:9], num_logits=9),
            Slice(kv=other, token_ids=tokens[3:], num_logits=1),
        ]
    )
    (tail,) = engine.forward([Slice(kv=kv, token_ids=tokens[9:], num_logits=5)])
    assert_same(torch.cat([head, tail]), plain_logits(plain_model(directory), tokens))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tied_and_untied_heads_equal_the_plain_model(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family, tie_word_embeddings=is_tied)
    engine = open_engine(directory)
    tokens = random_tokens(6, seed=6)
    (logits,) = engine.forward([Slice(kv=engine.cache.open(6), token_ids=tokens, num_logits=6)])
    assert_same(logits, plain_logits(plain_model(directory), tokens))


def test_a_head_that_differs_from_the_embedding_is_used_though_the_config_ties_them(
    tmp_path: Path,
) -> None:
    directory = make_tiny_model(tmp_path, "qwen3")
    path = directory / "model.safetensors"
    head = 0.15 * torch.randn(272, 64, generator=torch.Generator().manual_seed(8))
    save_file({**load_file(path), "lm_head.weight": head}, path, metadata={"format": "pt"})
    engine = open_engine(directory)
    tokens = random_tokens(6, seed=6)
    (logits,) = engine.forward([Slice(kv=engine.cache.open(6), token_ids=tokens, num_logits=6)])
    assert_same(logits, plain_logits(plain_model(directory), tokens))


def test_layers_over_three_shards_in_any_order_equal_the_plain_model(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    split_into_shards(directory, ["z.safetensors", "a.safetensors", "m.safetensors"])
    engine = open_engine(directory)
    tokens = random_tokens(6, seed=6)
    (logits,) = engine.forward([Slice(kv=engine.cache.open(6), token_ids=tokens, num_logits=6)])
    assert_same(logits, plain_logits(plain_model(directory), tokens))


def refusal(directory: Path, family: str, **options: Any) -> str:
    AutoConfig.for_model(family, **options).save_pretrained(directory)
    with pytest.raises(ConfigError, match=f"^this {family} model cannot be served") as caught:
        UnboundModule(directory)
    return caught.value.message


@pytest.mark.parametrize("family", ["mamba", "rwkv", "qwen3_next", "recurrent_gemma"])
def test_models_with_a_running_state_are_refused(family: str, tmp_path: Path) -> None:
    assert "running state" in refusal(tmp_path, family, num_hidden_layers=2, vocab_size=50)


def test_models_with_an_encoder_are_refused(tmp_path: Path) -> None:
    assert "encoder" in refusal(tmp_path, "t5", vocab_size=50)


def test_models_without_a_decoder_class_are_refused(tmp_path: Path) -> None:
    assert "no decoder" in refusal(tmp_path, "vit")


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_models_whose_attention_takes_biases_are_refused(family: str, tmp_path: Path) -> None:
    assert "packed" in refusal(tmp_path, family, vocab_size=50)


def test_falcon_with_biases_by_distance_is_refused(tmp_path: Path) -> None:
    assert "alibi" in refusal(tmp_path, "falcon", alibi=True, num_hidden_layers=2)


def test_rotary_embeddings_that_look_at_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic" in refusal(tmp_path, "llama", rope_parameters=rope, num_hidden_layers=2)


def test_the_context_ends_where_rotary_embeddings_would_change(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "phi3", **LONGROPE)
    assert UnboundModule(directory).max_context_tokens == 32


def test_quantized_models_are_refused_with_what_to_use(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    message = refusal(tmp_path, "llama", quantization_config=quantization)
    assert "choose the same model in BF16" in message
