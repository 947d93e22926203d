"""Float8 weights against torch's own conversion and the plain model with unpacked weights."""

import json
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
from headrace.model.formats import float8
from tests.support.tiny_models import make_tiny_model

TOKENS = [5, 9, 200, 31, 7, 7, 80]
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
        }
    },
    "ignore": ["lm_head"],
}


def all_numbers() -> Tensor:
    """[2, 127] each float8 number but NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128)[:, :127]
    return numbers.contiguous().view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_is_what_torch_says(dtype: torch.dtype) -> None:
    weight = all_numbers().view(torch.uint8).repeat_interleave(2, dim=1).view(float8.DTYPE)
    output = torch.empty(254, 2, dtype=dtype)
    float8.multiply(torch.eye(254, dtype=dtype), weight, output)
    torch.testing.assert_close(output.T, weight.to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_products_are_those_of_the_unpacked_matrix(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_rows, 16_384, generator=generator).to(float8.DTYPE)
    x = torch.randn(5, 16_384, generator=generator)
    whole = torch.empty(5, num_rows + 3)
    float8.multiply(x, weight, whole[:, 3:])
    torch.testing.assert_close(whole[:, 3:], x @ weight.float().T, rtol=1e-5, atol=1e-3)


def test_rows_at_an_odd_place_are_the_same() -> None:
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).to(float8.DTYPE)
    memory = torch.zeros(49, dtype=torch.uint8)
    memory[1:] = weight.view(torch.uint8).flatten()
    outputs = torch.empty(2, 8, 6)
    float8.multiply(torch.eye(8), weight, outputs[0])
    float8.multiply(torch.eye(8), memory[1:].view(float8.DTYPE).view(6, 8), outputs[1])
    assert torch.equal(outputs[0], outputs[1])


def quantize(directory: Path, *, per_tensor: bool = False, **config_changes: Any) -> Path:
    """Turn a tiny model's layers to float8, as compressed-tensors does."""
    path = directory / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            peaks = tensor.abs().amax(0 if per_tensor else 1, keepdim=True)
            scale = (peaks.amax().view(1) if per_tensor else peaks) / 448
            tensors[name] = (tensor / scale).to(float8.DTYPE)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config.update({"quantization_config": QUANTIZATION, **config_changes})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def unpacked_logits(directory: Path) -> Tensor:
    """[T, V] of the plain model with weights unpacked by torch."""
    config = json.loads((directory / "config.json").read_text())
    plain = directory / "plain"
    plain.mkdir()
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    full = {
        name: tensor.float() * tensors[f"{name}_scale"] if f"{name}_scale" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
    save_file(full, plain / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_logits_equal_those_of_the_unpacked_model(
    family: str, per_tensor: bool, tmp_path: Path
) -> None:
    directory = quantize(make_tiny_model(tmp_path, family), per_tensor=per_tensor)
    engine = Engine.resident(Checkpoint.open(directory), kv_tokens=16)
    kv = engine.cache.open(len(TOKENS))
    (logits,) = engine.forward([Slice(kv=kv, token_ids=TOKENS, num_logits=len(TOKENS))])
    torch.testing.assert_close(logits, unpacked_logits(directory), rtol=1e-5, atol=1e-5)


def test_packed_weights_stay_packed_in_memory(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    unpacked = Decoder(Checkpoint.open(directory)).weight_bytes
    assert Decoder(Checkpoint.open(quantize(directory))).weight_bytes < 0.75 * unpacked


def change(directory: Path, name: str, tensor: Tensor | None) -> None:
    """Put another tensor in a file, or take one out."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path)


WEIGHT = "model.layers.1.mlp.up_proj.weight"


def test_missing_scales_are_named(tmp_path: Path) -> None:
    directory = quantize(make_tiny_model(tmp_path))
    change(directory, f"{WEIGHT}_scale", None)
    with pytest.raises(CheckpointCorrupt, match=rf"{WEIGHT}_scale is missing"):
        Decoder(Checkpoint.open(directory))


def test_scales_of_another_shape_are_named(tmp_path: Path) -> None:
    directory = quantize(make_tiny_model(tmp_path))
    change(directory, f"{WEIGHT}_scale", torch.ones(7, 1))
    with pytest.raises(CheckpointCorrupt, match=rf"{WEIGHT}_scale has shape \[7, 1\]"):
        Decoder(Checkpoint.open(directory))


def test_nan_is_found_before_it_is_used(tmp_path: Path) -> None:
    directory = quantize(make_tiny_model(tmp_path))
    weight = load_file(directory / "model.safetensors")[WEIGHT]
    weight.view(torch.uint8)[3, 5] = 0xFF
    change(directory, WEIGHT, weight)
    engine = Engine.resident(Checkpoint.open(directory), kv_tokens=16)
    kv = engine.cache.open(1)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt, match=rf"{WEIGHT} holds NaN"):
            engine.forward([Slice(kv=kv, token_ids=[1], num_logits=1)])


def test_float8_outside_of_linear_layers_is_refused(tmp_path: Path) -> None:
    directory = quantize(make_tiny_model(tmp_path))
    name = "model.embed_tokens.weight"
    embedding = load_file(directory / "model.safetensors")[name]
    change(directory, name, embedding.to(float8.DTYPE))
    with pytest.raises(ConfigError, match=rf"{name} is float8, which only"):
        Decoder(Checkpoint.open(directory))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "int"}}},
        },
    ],
    ids=str,
)
def test_other_quantizations_are_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    directory = quantize(make_tiny_model(tmp_path), quantization_config=quantization)
    with pytest.raises(ConfigError, match="choose the same model in BF16"):
        Decoder(Checkpoint.open(directory))
