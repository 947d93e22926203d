"""Streamed decoders against the plain Hugging Face model, float32, tiny random weights."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headrace.errors import PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.model.engine import Engine, Slice
from tests.support.lent_weights import LentWeights
from tests.support.tiny_models import ARCHITECTURES, make_tiny_model, split_into_shards

KIB, MIB = 1 << 10, 1 << 20
FIRST = [5, 17, 99, 5, 5, 250, 31, 8, 64, 200, 1, 77, 140, 9]
SECOND = [120, 3, 3, 44, 180, 66, 2]
TREE, PARENTS = [11, 12, 13, 14, 15, 16], [-1, -1, 0, 0, 2, 1]
PATHS = [[11], [12], [11, 13], [11, 14], [11, 13, 15], [12, 16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the plain model says."""

    directory: Path
    first: Tensor
    """[14, V] after each token of FIRST."""
    second: Tensor
    """[7, V] after each token of SECOND."""
    tree: Tensor
    """[6, V] after each path, behind SECOND."""


@torch.inference_mode()
def reference_of(directory: Path, dtype: torch.dtype = torch.float32) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()

    def logits(token_ids: Sequence[int]) -> Tensor:
        output: Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return output.float()

    return Reference(
        directory=directory,
        first=logits(FIRST),
        second=logits(SECOND),
        tree=torch.stack([logits([*SECOND, *path])[-1] for path in PATHS]),
    )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    directory = make_tiny_model(tmp_path_factory.mktemp("model"), request.param)
    return reference_of(directory)


class Streamed:
    """A decoder that borrows its weights, and its lender."""

    def __init__(self, directory: Path, *, unit_bytes: int, is_half_kept: bool = False) -> None:
        decoder = self.decoder = Decoder(Checkpoint.open(directory))
        plan = decoder.plan(unit_bytes=unit_bytes)
        if is_half_kept:
            plan = plan.keeping(plan.streamed_bytes // 2)
        self.plan = plan
        self.weights = LentWeights(plan)
        decoder.stream(plan, self.weights)
        self.engine = Engine(decoder, kv_tokens=64, block_size=4)

    def forward(self, *slices: Slice) -> list[Tensor]:
        self.weights.begin_sweep()
        logits = self.engine.forward(slices)
        self.weights.end_sweep()
        return logits


def assert_same(ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def check(model: Streamed, reference: Reference) -> None:
    """Two sequences in chunks side by side, then a tree behind one of them."""
    first, second = model.engine.cache.open(14), model.engine.cache.open(13)
    head, other_head = model.forward(
        Slice(kv=first, token_ids=FIRST[:8], num_logits=8),
        Slice(kv=second, token_ids=SECOND[:3], num_logits=3),
    )
    other_tail, tail = model.forward(
        Slice(kv=second, token_ids=SECOND[3:], num_logits=4),
        Slice(kv=first, token_ids=FIRST[8:], num_logits=6),
    )
    assert_same(torch.cat([head, tail]), reference.first)
    assert_same(torch.cat([other_head, other_tail]), reference.second)
    (tree,) = model.forward(Slice(kv=second, token_ids=TREE, num_logits=len(TREE), parents=PARENTS))
    assert_same(tree, reference.tree)


@pytest.mark.parametrize("unit_bytes", [4 * KIB, 64 * KIB, 64 * MIB])
def test_streamed_logits_equal_the_plain_model(reference: Reference, unit_bytes: int) -> None:
    check(Streamed(reference.directory, unit_bytes=unit_bytes), reference)


def test_logits_with_half_of_the_units_resident_equal_the_plain_model(
    reference: Reference,
) -> None:
    model = Streamed(reference.directory, unit_bytes=4 * KIB, is_half_kept=True)
    assert model.plan.resident_units
    assert model.plan.streamed_units
    check(model, reference)


def test_only_vectors_and_biases_are_loaded_to_stay(reference: Reference) -> None:
    module = Streamed(reference.directory, unit_bytes=64 * KIB).decoder.module
    matrices = [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and parameter.numel() and not parameter.is_meta
    ]
    assert [name for name in matrices if not name.endswith("_bias")] == []


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_tied_and_untied_heads_are_streamed(family: str, is_tied: bool, tmp_path: Path) -> None:
    reference = reference_of(make_tiny_model(tmp_path, family, tie_word_embeddings=is_tied))
    check(Streamed(reference.directory, unit_bytes=4 * KIB), reference)


def test_a_head_that_differs_from_the_embedding_is_streamed_though_the_config_ties_them(
    tmp_path: Path,
) -> None:
    directory = make_tiny_model(tmp_path, "qwen3")
    path = directory / "model.safetensors"
    head = 0.15 * torch.randn(272, 64, generator=torch.Generator().manual_seed(8))
    save_file({**load_file(path), "lm_head.weight": head}, path, metadata={"format": "pt"})
    check(Streamed(directory, unit_bytes=4 * KIB), reference_of(directory))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gpt_neox"])
def test_layers_over_three_shards_in_any_order_are_streamed(family: str, tmp_path: Path) -> None:
    reference = reference_of(make_tiny_model(tmp_path, family))
    split_into_shards(tmp_path, ["z.safetensors", "a.safetensors", "m.safetensors"])
    check(Streamed(tmp_path, unit_bytes=4 * KIB), reference)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_tensors_at_odd_offsets_are_streamed(family: str, tmp_path: Path) -> None:
    reference = reference_of(make_tiny_model(tmp_path, family))
    shift_to_odd_offsets(tmp_path / "model.safetensors")
    spans = Checkpoint.open(tmp_path).tensors.values()
    assert all(span.offset_bytes % 2 for span in spans)
    check(Streamed(tmp_path, unit_bytes=4 * KIB, is_half_kept=True), reference)


def shift_to_odd_offsets(path: Path) -> None:
    """Lay a file of float32 tensors out again, behind a header of odd length."""
    header = {}
    data = b""
    for name, tensor in load_file(path).items():
        begin = len(data)
        data += tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": [*tensor.shape],
            "data_offsets": [begin, len(data)],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (1 - len(encoded) % 2)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def with_compute_type(directory: Path, dtype: str) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return directory


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "gpt2"])
def test_half_precision_files_compute_in_float32(
    family: str, stored: torch.dtype, tmp_path: Path
) -> None:
    directory = with_compute_type(make_tiny_model(tmp_path, family, dtype=stored), "float32")
    check(Streamed(directory, unit_bytes=4 * KIB, is_half_kept=True), reference_of(directory))


@pytest.mark.parametrize("computed", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_half_precision_is_as_exact_as_the_plain_model_in_it(
    family: str, stored: torch.dtype, computed: torch.dtype, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family, dtype=stored)
    with_compute_type(directory, str(computed).removeprefix("torch."))
    exact, plain = reference_of(directory).first, reference_of(directory, computed).first
    model = Streamed(directory, unit_bytes=4 * KIB)
    kv = model.engine.cache.open(14)
    (logits,) = model.forward(Slice(kv=kv, token_ids=FIRST, num_logits=14))
    assert rms(logits - exact) <= 1.5 * rms(plain - exact)


def rms(x: Tensor) -> float:
    return float(x.pow(2).mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_a_sweep_that_fails_anywhere_leaves_the_decoder_as_it_was(
    family: str, tmp_path: Path
) -> None:
    reference = reference_of(make_tiny_model(tmp_path, family))
    model = Streamed(reference.directory, unit_bytes=64 * KIB)
    kv = model.engine.cache.open(14)
    whole = Slice(kv=kv, token_ids=FIRST, num_logits=14)
    for piece_index in model.weights.piece_indices:
        model.weights.begin_sweep()
        model.weights.fails_at = piece_index
        with pytest.raises(PeerUnavailable):
            model.engine.forward([whole])
        assert kv.length == 0
        assert not holds_any(model.decoder.module, model.weights.lent)
    model.weights.fails_at = None
    kv.truncate(0)
    model.engine.cache.close(kv)
    check(model, reference)


def holds_any(module: nn.Module, tensors: Sequence[Tensor]) -> bool:
    lent = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    held = {p.untyped_storage().data_ptr() for p in module.parameters() if not p.is_meta}
    return bool(lent & held)
