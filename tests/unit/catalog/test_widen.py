"""A widened model is larger and computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.catalog.widen import widen
from headrace.errors import ConfigError
from headrace.model.checkpoint import Checkpoint
from headrace.model.manifest import FILE_NAME
from tests.support.tiny_models import make_tiny_model, split_into_shards

_NUM_BYTES = 4_000_000


def _logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(1, 25).view(1, -1)).logits
    return logits.float()


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {}), ("llama", {"mlp_bias": True}), ("qwen3", {}), ("gemma3_text", {})],
)
def test_a_widened_model_is_of_the_wanted_size_and_has_the_same_logits(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    source = make_tiny_model(tmp_path / "small", family, **overrides)
    widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    assert abs(Checkpoint.open(tmp_path / "large").num_bytes / _NUM_BYTES - 1) < 0.1
    # transformers reads both, so the format is checked by its reader.
    expected = _logits(source, torch.float32)
    torch.testing.assert_close(
        _logits(tmp_path / "large", torch.float32), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_tiny_model(tmp_path / "small", dtype=dtype)
    widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    tensors = Checkpoint.open(tmp_path / "large").tensors
    assert {span.dtype for span in tensors.values()} == {
        {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    }
    # Read as float32 both sum in the same precision, so that rounding does not hide a difference.
    torch.testing.assert_close(
        _logits(tmp_path / "large", torch.float32),
        _logits(source, torch.float32),
        rtol=0,
        atol=1e-4,
    )


def test_the_config_tells_the_new_width_and_other_files_come_along(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    old, new = (
        json.loads((directory / "config.json").read_text())
        for directory in (source, tmp_path / "large")
    )
    gate = Checkpoint.open(tmp_path / "large").tensors["model.layers.0.mlp.gate_proj.weight"]
    assert new == {**old, "intermediate_size": gate.shape[0]}
    assert gate.shape[0] % 64 == 0
    tokenizer = (tmp_path / "large" / "tokenizer.json").read_bytes()
    assert tokenizer == (source / "tokenizer.json").read_bytes()


def test_shards_become_one_file(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    expected = _logits(source, torch.float32)
    split_into_shards(source, ["a.safetensors", "b.safetensors", "c.safetensors"])
    widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    assert [path.name for path in (tmp_path / "large").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
    torch.testing.assert_close(
        _logits(tmp_path / "large", torch.float32), expected, rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral", "qwen3_moe", "nemotron"])
def test_a_model_without_such_an_mlp_is_refused_by_name(tmp_path: Path, family: str) -> None:
    source = make_tiny_model(tmp_path / "small", family)
    with pytest.raises(ConfigError, match=family):
        widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    assert not (tmp_path / "large").exists()


def test_a_model_that_is_as_large_already_is_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    with pytest.raises(ConfigError, match="already: ask for more than 1\\.00 KiB"):
        widen(source, tmp_path / "large", num_bytes=1024)


def test_an_existing_directory_is_never_replaced(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    with pytest.raises(ConfigError, match="give another --output"):
        widen(source, source, num_bytes=_NUM_BYTES)


def test_a_size_that_no_disk_holds_is_refused(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    with pytest.raises(ConfigError, match="larger disk"):
        widen(source, tmp_path / "large", num_bytes=1 << 60)


def test_the_manifest_of_the_source_stays_behind(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "small")
    (source / FILE_NAME).write_text("{}")
    widen(source, tmp_path / "large", num_bytes=_NUM_BYTES)
    assert not (tmp_path / "large" / FILE_NAME).exists()
