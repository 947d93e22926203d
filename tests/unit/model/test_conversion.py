"""Conversions against the library's own loading, tiny random weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint
from headrace.model.conversion import ParameterSource, parameter_sources
from headrace.model.module import UnboundModule
from tests.support.tiny_models import ARCHITECTURES, make_tiny_model, split_into_shards


def sources_of(directory: Path) -> dict[str, ParameterSource]:
    return parameter_sources(UnboundModule(directory).module, Checkpoint.open(directory).tensors)


def load_all(directory: Path) -> dict[str, Tensor]:
    return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


def join_runs(source: ParameterSource, tensors: dict[str, Tensor]) -> Tensor:
    assert source.runs is not None
    rows = []
    for run in source.runs:
        tensor = tensors[run.tensor_name]
        table = tensor.reshape(-1, tensor.shape[-1])
        rows.append(table[run.begin_row : run.end_row])
    return torch.cat(rows).view(source.shape).to(source.dtype)


def check_equal_to_the_library(directory: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    tensors = load_all(directory)
    sources = sources_of(directory)
    assert sources.keys() == plain.keys()
    for name, source in sources.items():
        assembled = source.assemble({n: tensors[n] for n in source.tensor_names})
        assert (assembled.shape, assembled.dtype) == (source.shape, source.dtype), name
        torch.testing.assert_close(assembled, plain[name], rtol=0, atol=0, msg=name)
        if source.runs is not None:
            joined = join_runs(source, tensors)
            torch.testing.assert_close(joined, plain[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_parameter_equals_the_one_that_the_library_loads(family: str, tmp_path: Path) -> None:
    check_equal_to_the_library(make_tiny_model(tmp_path, family))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_matrix_is_rows_of_file_tensors(family: str, tmp_path: Path) -> None:
    sources = sources_of(make_tiny_model(tmp_path, family))
    assert [name for name, source in sources.items() if source.runs is None] == []


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("computed", ["float32", "float16", "bfloat16"])
def test_weights_are_cast_to_the_type_of_the_config(
    stored: torch.dtype, computed: str, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, "deepseek_v3", dtype=stored)
    config = AutoConfig.from_pretrained(directory)
    config.dtype = computed
    config.save_pretrained(directory)
    check_equal_to_the_library(directory)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_the_embedding_where_they_are_tied(is_tied: bool, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    check_equal_to_the_library(directory)
    sources = sources_of(directory)
    names = sources["lm_head.weight"].tensor_names
    assert names == (("model.embed_tokens.weight",) if is_tied else ("lm_head.weight",))


def test_layers_over_three_shards_in_any_order_are_found(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "mixtral")
    split_into_shards(directory, ["z.safetensors", "a.safetensors", "m.safetensors"])
    check_equal_to_the_library(directory)


def test_experts_are_rows_of_their_own_tensors_in_turn(tmp_path: Path) -> None:
    sources = sources_of(make_tiny_model(tmp_path, "mixtral"))
    runs = sources["model.layers.0.mlp.experts.gate_up_proj"].runs
    assert runs is not None
    name = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
    assert [(run.tensor_name, run.begin_row, run.end_row) for run in runs] == [
        (name.format(expert, matrix), 0, 128) for expert in range(4) for matrix in ("w1", "w3")
    ]


def test_nothing_is_copied_where_no_operation_is_needed(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    tensors = load_all(directory)
    source = sources_of(directory)["model.layers.0.mlp.up_proj.weight"]
    assembled = source.assemble(tensors)
    assert assembled.data_ptr() == tensors["model.layers.0.mlp.up_proj.weight"].data_ptr()


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_decoder_inside_a_multimodal_checkpoint_is_found(prefix: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "gemma3_text")
    plain = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    path = directory / "model.safetensors"
    tensors = load_file(path)
    inner = {
        n.removeprefix("model.") if prefix.startswith("model") else n: t for n, t in tensors.items()
    }
    nested = {f"{prefix}{name}": tensor for name, tensor in inner.items()}
    nested["vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.zeros(4, 4)
    save_file(nested, path)
    sources = sources_of(directory)
    for name, tensor in plain.items():
        torch.testing.assert_close(sources[name].assemble(nested), tensor, rtol=0, atol=0)


def test_tensors_without_use_are_ignored(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    extra["model.layers.4.mlp.up_proj.weight"] = torch.ones(128, 64)
    save_file({**load_file(path), **extra}, path)
    check_equal_to_the_library_but_for_extra = sources_of(directory)
    used = {n for s in check_equal_to_the_library_but_for_extra.values() for n in s.tensor_names}
    assert not used & extra.keys()


def test_up_to_eight_missing_parameters_are_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if ".layers.2." not in n}
    save_file(kept, path)
    with pytest.raises(
        CheckpointCorrupt, match=r"lacks 9 tensors.*layers\.2\..*, \.\.\.$"
    ) as caught:
        sources_of(directory)
    assert caught.value.message.count("model.layers.2.") == 8


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    path = directory / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(63)}, path)
    with pytest.raises(CheckpointCorrupt, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        sources_of(directory)


def test_an_expert_that_is_missing_is_no_smaller_model(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "mixtral")
    path = directory / "model.safetensors"
    lost = "model.layers.1.block_sparse_moe.experts.2."
    save_file({n: t for n, t in load_file(path).items() if not n.startswith(lost)}, path)
    with pytest.raises(CheckpointCorrupt, match=r"layers\.1\.mlp\.experts"):
        sources_of(directory)
