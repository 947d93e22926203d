"""Pieces are checked by themselves, however a tensor is cut, once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint
from headrace.model.integrity import Integrity
from headrace.model.manifest import BLOCK_BYTES, FILE_NAME, Manifest
from tests.support.checkpoints import random_bytes, write_single
from tests.support.damage import flip_bit

NAME = "model.layers.0.a.weight"
DATA = random_bytes(3 * BLOCK_BYTES + 500)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(with_manifest(tmp_path_factory.mktemp("untouched")))


def with_manifest(directory: Path) -> Path:
    write_single(directory, {"before": b"odd-", NAME: DATA})
    Manifest.of(Checkpoint.open(directory), lambda *_: None).write(directory)
    return directory


@settings(max_examples=30, deadline=None)
@given(ends=st.lists(st.integers(0, len(DATA)), min_size=2, max_size=2))
def test_any_piece_of_the_file_is_right_and_no_other_bytes_are(
    untouched: Checkpoint, ends: list[int]
) -> None:
    begin, end = sorted(ends)
    span = untouched.tensors[NAME]
    integrity = Integrity(untouched)
    integrity.check(span, begin, memoryview(DATA[begin:end]))
    assert integrity.is_checked(span, begin, end - begin)
    if begin < end:
        wrong = bytearray(DATA[begin:end])
        wrong[(end - begin) // 2] ^= 1
        with pytest.raises(CheckpointCorrupt, match=rf"tensor {NAME} in model\.safetensors"):
            Integrity(untouched).check(span, begin, memoryview(wrong))


def test_a_wrong_piece_stays_unchecked(untouched: Checkpoint) -> None:
    span = untouched.tensors[NAME]
    integrity = Integrity(untouched)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt):
            integrity.check(span, 0, memoryview(bytes(100)))
    assert not integrity.is_checked(span, 0, 100)


def test_a_piece_that_was_right_is_not_hashed_again(untouched: Checkpoint) -> None:
    span = untouched.tensors[NAME]
    integrity = Integrity(untouched)
    integrity.check(span, 0, memoryview(DATA[:100]))
    integrity.check(span, 0, memoryview(bytes(100)))  # taken for what was right


def test_a_row_is_checked_with_its_blocks_and_no_others(tmp_path: Path) -> None:
    directory = with_manifest(tmp_path)
    flip_bit(directory, NAME, BLOCK_BYTES + 7)
    checkpoint = Checkpoint.open(directory)
    span, integrity = checkpoint.tensors[NAME], Integrity(checkpoint)
    integrity.check_around(span, 100, 50)
    integrity.check_around(span, 3 * BLOCK_BYTES + 400, 100)
    for offset, num_bytes in ((BLOCK_BYTES - 1, 2), (BLOCK_BYTES + 900, 10)):
        with pytest.raises(CheckpointCorrupt, match=NAME):
            integrity.check_around(span, offset, num_bytes)


def test_without_a_manifest_nothing_is_checked(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_single(tmp_path, {NAME: DATA}))
    span, integrity = checkpoint.tensors[NAME], Integrity(checkpoint)
    assert integrity.is_checked(span, 0, len(DATA))
    integrity.check(span, 0, memoryview(bytes(100)))


def test_another_size_or_name_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    directory = with_manifest(tmp_path)
    write_single(directory, {NAME: DATA[:-2], "new": b"abcd"})
    with pytest.raises(CheckpointCorrupt, match=r"instead of.*headrace-manifest.*and \d+ more"):
        Integrity(Checkpoint.open(directory))


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    directory = with_manifest(tmp_path)
    (directory / FILE_NAME).write_bytes(b"{}")
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        Integrity(Checkpoint.open(directory))
