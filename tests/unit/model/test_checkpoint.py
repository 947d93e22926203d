"""What is opened, and what is refused before a byte of weights is read."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model.checkpoint import Checkpoint, TensorSpan
from tests.support.checkpoints import (
    INDEX,
    header_of,
    layer_tensors,
    random_bytes,
    write_config,
    write_file,
    write_index,
    write_sharded,
    write_single,
    write_tensors,
)
from tests.support.tiny_models import make_tiny_model

A, B, C = "model.layers.0.a.weight", "model.layers.0.b.weight", "model.layers.0.c.weight"


def bytes_of(span: TensorSpan) -> bytes:
    return span.file.read_bytes()[span.offset_bytes : span.offset_bytes + span.num_bytes]


def test_a_single_file_without_an_index_opens(tmp_path: Path) -> None:
    tensors = layer_tensors([[64, 10], [64, 10], [64, 10]])
    checkpoint = Checkpoint.open(write_single(tmp_path / "tiny", tensors))
    assert checkpoint.name == "tiny"
    assert {name: bytes_of(span) for name, span in checkpoint.tensors.items()} == tensors
    assert checkpoint.num_bytes == 30 + 3 * (64 + 10)
    assert checkpoint.files == [tmp_path / "tiny/model.safetensors"]


def test_spans_hold_what_the_safetensors_library_loads(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    loaded = load_file(directory / "model.safetensors")
    spans = Checkpoint.open(directory).tensors
    assert spans.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert bytes_of(spans[name]) == tensor.numpy().tobytes()
        assert spans[name].shape == tuple(tensor.shape)


def test_a_layer_over_three_shards_in_any_order_is_whole(tmp_path: Path) -> None:
    tensors = {name: random_bytes(50, seed=seed) for seed, name in enumerate((A, B, C))}
    write_sharded(
        tmp_path,
        {
            "model-3-of-3.safetensors": {A: tensors[A]},
            "oddly_named.safetensors": {C: tensors[C], "model.norm.weight": b"ab"},
            "model-00001-of-00003.safetensors": {B: tensors[B]},
        },
    )
    spans = Checkpoint.open(tmp_path).tensors
    assert {name: bytes_of(spans[name]) for name in tensors} == tensors
    assert [file.name for file in Checkpoint.open(tmp_path).files] == [
        "model-00001-of-00003.safetensors",
        "model-3-of-3.safetensors",
        "oddly_named.safetensors",
    ]


def test_only_what_the_index_names_counts(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"one.safetensors": {A: b"abcd", B: b"efgh"}})
    write_tensors(tmp_path / "model.safetensors", {C: b"from another conversion"})
    write_index(tmp_path, {A: "one.safetensors"})
    assert set(Checkpoint.open(tmp_path).tensors) == {A}


def test_every_shard_that_is_absent_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, {f"{name}.safetensors": {f"{name}.w": b"ab"} for name in "abc"})
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "c.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"not here: a\.safetensors, c\.safetensors$"):
        Checkpoint.open(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"one.safetensors": {A: b"abcd"}, "two.safetensors": {B: b"abcd"}})
    write_index(tmp_path, {A: "one.safetensors", B: "two.safetensors", C: "one.safetensors"})
    with pytest.raises(CheckpointCorrupt, match=rf"their shards lack: {C}$"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors"])
def test_an_index_never_leads_outside_the_directory(tmp_path: Path, shard: str) -> None:
    directory = tmp_path / "model"
    write_config(directory)
    write_tensors(tmp_path / "a.safetensors", {A: b"abcd"})
    write_index(directory, {A: shard})
    with pytest.raises(CheckpointCorrupt, match="outside the directory"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "\xff", "[" * 9999]
)
def test_a_damaged_index_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    write_single(tmp_path, {A: b"abcd"})
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointCorrupt, match=INDEX):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("num_lost", [1, 100, 1 << 12])
def test_a_truncated_shard_is_named(tmp_path: Path, num_lost: int) -> None:
    big = random_bytes(1 << 14)
    write_sharded(tmp_path, {"whole.safetensors": {A: big}, "cut.safetensors": {B: big}})
    file = tmp_path / "cut.safetensors"
    file.write_bytes(file.read_bytes()[:-num_lost])
    with pytest.raises(CheckpointCorrupt, match=r"cut\.safetensors is truncated"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("num_left", [0, 1, 7, 8, 9, 60])
def test_a_file_cut_off_in_its_header_is_refused(tmp_path: Path, num_left: int) -> None:
    write_single(tmp_path, {A: b"abcd"})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_left])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors is not a complete"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 10**6, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused(tmp_path: Path, num_bytes: int) -> None:
    write_single(tmp_path, {A: b"abcd"})
    file = tmp_path / "model.safetensors"
    file.write_bytes(num_bytes.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors is not a complete"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("header", [[], "text", None, 7])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: object) -> None:
    write_config(tmp_path)
    write_file(tmp_path / "model.safetensors", header, b"abcd")
    with pytest.raises(CheckpointCorrupt, match="damaged header"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("encoded", [b'{"a": ', b"\xff\xfe{}", b"[" * 100_000])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, encoded: bytes) -> None:
    write_config(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(CheckpointCorrupt, match="damaged header"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [10**15, 10**15 + 100]},
        {"data_offsets": [-100, 0]},
        {"data_offsets": [100, 0]},
        {"data_offsets": [0, 98]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"data_offsets": [0, float("inf")]},
        {"shape": [-50]},
        {"shape": [-5, -10]},
        {"shape": [2**40, 2**40]},
        {"shape": None},
        {"dtype": "Q7"},
        {"dtype": ["BF16"]},
    ],
    ids=str,
)
def test_a_span_that_cannot_be_is_refused_by_its_name(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    write_config(tmp_path)
    header = header_of({A: bytes(100), B: bytes(100)})
    header[A].update(wrong)
    write_file(tmp_path / "model.safetensors", header, bytes(200))
    with pytest.raises(CheckpointCorrupt, match=rf"model\.safetensors.*{A}"):
        Checkpoint.open(tmp_path)


def test_an_entry_that_is_no_object_is_refused_by_its_name(tmp_path: Path) -> None:
    write_config(tmp_path)
    write_file(tmp_path / "model.safetensors", {A: "here"}, bytes(200))
    with pytest.raises(CheckpointCorrupt, match=f"{A} is damaged"):
        Checkpoint.open(tmp_path)


def test_overlapping_spans_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    header = header_of({A: bytes(100), B: bytes(100)})
    header[B]["data_offsets"] = [98, 198]
    write_file(tmp_path / "model.safetensors", header, bytes(200))
    with pytest.raises(CheckpointCorrupt, match=f"{B} overlaps another"):
        Checkpoint.open(tmp_path)


def test_a_tensor_without_elements_is_no_overlap(tmp_path: Path) -> None:
    tensors = {A: b"abcd", "model.layers.0.empty": b"", B: b"efgh"}
    checkpoint = Checkpoint.open(write_single(tmp_path, tensors))
    assert {name: bytes_of(span) for name, span in checkpoint.tensors.items()} == tensors


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_bytes(b"never read")
    with pytest.raises(ConfigError, match="pickled weights, which are never opened"):
        Checkpoint.open(tmp_path)


def test_pickled_weights_beside_safetensors_do_no_harm(tmp_path: Path) -> None:
    write_single(tmp_path, {A: b"abcd"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert set(Checkpoint.open(tmp_path).tensors) == {A}


def test_gguf_alone_is_refused_with_what_to_use(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"GGUF.*give a safetensors directory"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="no safetensors file"):
        Checkpoint.open(tmp_path)


def test_a_tied_head_is_absent_and_not_missed(tmp_path: Path) -> None:
    tied = Checkpoint.open(make_tiny_model(tmp_path / "tied", "qwen3"))
    untied = Checkpoint.open(make_tiny_model(tmp_path / "untied", "llama"))
    assert "lm_head.weight" not in tied.tensors
    assert "lm_head.weight" in untied.tensors


def test_a_fingerprint_stays_the_same_until_a_file_changes(tmp_path: Path) -> None:
    tensors = {A: b"abcd", B: b"efgh"}
    checkpoint = Checkpoint.open(write_single(tmp_path, tensors))
    file = tmp_path / "model.safetensors"
    os.utime(file, ns=(0, 0))
    before = checkpoint.fingerprint()
    assert Checkpoint.open(tmp_path).fingerprint() == before
    with file.open("r+b") as stream:  # other weights of the same shape
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    assert Checkpoint.open(tmp_path).fingerprint() != before


def test_a_copy_with_the_times_of_the_original_has_its_fingerprint(tmp_path: Path) -> None:
    original = write_single(tmp_path / "original", {A: b"abcd"})
    copy = Path(shutil.copytree(original, tmp_path / "mounted/elsewhere"))
    assert Checkpoint.open(copy).fingerprint() == Checkpoint.open(original).fingerprint()


def test_tensors_at_other_places_have_another_fingerprint(tmp_path: Path) -> None:
    one = write_single(tmp_path / "one", {A: b"abcd", B: b"efgh"})
    two = write_single(tmp_path / "two", {B: b"efgh", A: b"abcd"})
    for directory in (one, two):
        os.utime(directory / "model.safetensors", ns=(0, 0))
    assert Checkpoint.open(one).fingerprint() != Checkpoint.open(two).fingerprint()
