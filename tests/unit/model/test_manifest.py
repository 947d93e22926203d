"""A manifest tells every difference by name, and is never half there."""

import hashlib
import json
from pathlib import Path

import pytest

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model.checkpoint import Checkpoint
from headrace.model.manifest import BLOCK_BYTES, FILE_NAME, Manifest
from tests.support.checkpoints import random_bytes, write_sharded, write_single, write_tensors
from tests.support.damage import flip_bit

A, B, C = "model.layers.0.a.weight", "model.layers.0.b.weight", "model.norm.weight"
BIG = random_bytes(2 * BLOCK_BYTES + 1000)
SMALL = random_bytes(1234, seed=1)


def ignore(done: int, total: int) -> None:
    """No progress is shown."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shards = {"one.safetensors": {A: BIG, C: SMALL}, "two.safetensors": {B: SMALL[:500]}}
    return write_sharded(tmp_path / "model", shards)


def write_manifest(directory: Path) -> Manifest:
    manifest = Manifest.of(Checkpoint.open(directory), ignore)
    manifest.write(directory)
    return manifest


def differences(directory: Path) -> list[str]:
    manifest = Manifest.load(directory)
    assert manifest is not None
    return manifest.differences(directory, ignore)


def test_the_file_has_sizes_and_the_sha256_of_every_block(model: Path) -> None:
    write_manifest(model)
    content = json.loads((model / FILE_NAME).read_bytes())
    assert content["files"] == {
        name: {"num_bytes": (model / name).stat().st_size}
        for name in ("one.safetensors", "two.safetensors")
    }
    blocks = [BIG[: 1 << 20], BIG[1 << 20 : 2 << 20], BIG[2 << 20 :]]
    assert content["tensors"] == {
        A: {
            "file": "one.safetensors",
            "num_bytes": len(BIG),
            "blocks": "".join(hashlib.sha256(block).hexdigest() for block in blocks),
        },
        B: {
            "file": "two.safetensors",
            "num_bytes": 500,
            "blocks": hashlib.sha256(SMALL[:500]).hexdigest(),
        },
        C: {
            "file": "one.safetensors",
            "num_bytes": 1234,
            "blocks": hashlib.sha256(SMALL).hexdigest(),
        },
    }


def test_what_is_written_is_loaded(model: Path) -> None:
    assert Manifest.load(model) is None
    manifest = write_manifest(model)
    assert Manifest.load(model) == manifest
    assert differences(model) == []


def test_a_tensor_of_many_reads_has_its_blocks_in_order(tmp_path: Path) -> None:
    data = random_bytes(1 << 20) * 70 + b"ab"
    directory = write_single(tmp_path / "model", {A: data})
    digests = write_manifest(directory).tensors[A].digests
    full, rest = hashlib.sha256(data[: 1 << 20]).digest(), hashlib.sha256(b"ab").digest()
    assert digests == full * 70 + rest


def test_progress_ends_at_all_bytes(model: Path) -> None:
    shown: list[tuple[int, int]] = []
    Manifest.of(Checkpoint.open(model), lambda done, total: shown.append((done, total)))
    num_bytes = len(BIG) + 1234 + 500
    assert shown == sorted(shown)
    assert shown[-1] == (num_bytes, num_bytes)


@pytest.mark.parametrize(
    "offset_bytes", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5, len(BIG) - 1]
)
def test_one_flipped_bit_is_found_whatever_the_times_say(model: Path, offset_bytes: int) -> None:
    write_manifest(model)
    flip_bit(model, A, offset_bytes)
    assert differences(model) == [f"tensor {A} in one.safetensors has other content"]


def test_every_tensor_that_differs_is_named(model: Path) -> None:
    write_manifest(model)
    flip_bit(model, B, 3)
    flip_bit(model, C, 3)
    assert sorted(differences(model)) == [
        f"tensor {B} in two.safetensors has other content",
        f"tensor {C} in one.safetensors has other content",
    ]


def test_other_sizes_new_and_missing_tensors_are_named(model: Path) -> None:
    write_manifest(model)
    write_sharded(model, {"one.safetensors": {A: BIG[:-2], "new": b"ab", C: SMALL}})
    found = "\n".join(differences(model))
    assert f"tensor {A} in one.safetensors has 2,098,150 bytes instead of 2,098,152" in found
    assert "tensor new in one.safetensors is new" in found
    assert f"tensor {B} is missing" in found
    assert "one.safetensors has " in found
    assert C not in found


def test_a_tensor_that_moved_to_another_file_is_named(model: Path) -> None:
    write_manifest(model)
    write_sharded(
        model, {"one.safetensors": {A: BIG}, "two.safetensors": {B: SMALL[:500], C: SMALL}}
    )
    assert f"tensor {C} is in two.safetensors instead of one.safetensors" in differences(model)


def test_missing_and_truncated_files_are_named_though_the_checkpoint_does_not_open(
    model: Path,
) -> None:
    write_manifest(model)
    size = (model / "one.safetensors").stat().st_size
    (model / "one.safetensors").write_bytes((model / "one.safetensors").read_bytes()[:-1])
    (model / "two.safetensors").unlink()
    found = differences(model)
    assert f"one.safetensors has {size - 1:,} bytes instead of {size:,}" in found
    assert "two.safetensors is missing" in found


def test_tensors_without_bytes_have_no_blocks(tmp_path: Path) -> None:
    directory = write_single(tmp_path / "model", {A: b""})
    assert write_manifest(directory).tensors[A].digests == b""
    assert differences(directory) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"hash": "md5"},
        {"block_bytes": 4096},
        {"files": None},
        {"files": {"one.safetensors": {"num_bytes": -1}}},
        {"files": {"one.safetensors": {"num_bytes": True}}},
        {"tensors": []},
        {"tensors": {A: None}},
        {"tensors": {A: {"file": "one.safetensors", "num_bytes": 10, "blocks": "ab"}}},
        {"tensors": {A: {"file": "one.safetensors", "num_bytes": 10, "blocks": "zz" * 32}}},
        {"tensors": {A: {"file": "one.safetensors", "num_bytes": 10}}},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_is_refused(model: Path, wrong: dict[str, object]) -> None:
    write_manifest(model)
    content = json.loads((model / FILE_NAME).read_bytes())
    (model / FILE_NAME).write_text(json.dumps({**content, **wrong}))
    with pytest.raises(CheckpointCorrupt, match=rf"{FILE_NAME} is damaged: .*--update"):
        Manifest.load(model)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_cut_off_or_no_json_is_refused(model: Path, content: bytes) -> None:
    (model / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        Manifest.load(model)


def test_a_failed_write_leaves_the_old_manifest_and_nothing_else(model: Path) -> None:
    old = write_manifest(model)
    (model / FILE_NAME).unlink()
    (model / FILE_NAME).mkdir()  # which no file can replace
    before = sorted(model.iterdir())
    with pytest.raises(ConfigError, match=f"cannot write {FILE_NAME}"):
        old.write(model)
    assert sorted(model.iterdir()) == before


def test_a_manifest_replaces_the_old_one_at_once(model: Path) -> None:
    write_manifest(model)
    with (model / FILE_NAME).open("rb") as reading:
        flip_bit(model, A, 0)
        write_manifest(model)
        old = json.loads(reading.read())
    assert old["tensors"][A] != json.loads((model / FILE_NAME).read_bytes())["tensors"][A]
    assert differences(model) == []


def test_a_file_that_changes_while_it_is_hashed_gives_no_manifest(model: Path) -> None:
    def change(done: int, total: int) -> None:
        write_tensors(model / "two.safetensors", {B: SMALL[:500]})

    with pytest.raises(CheckpointCorrupt, match=r"was changed while|ends before"):
        Manifest.of(Checkpoint.open(model), change)
