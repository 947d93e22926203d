"""Reads against a plain copy of the ranges' bytes, out of files simulated in memory."""

from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.streamer.layout import ALIGNMENT_BYTES, FileRange, Read, lay_out
from tests.support.checkpoints import random_bytes

FILE_BYTES = 4 << 20
FILES = {Path(name): random_bytes(FILE_BYTES, seed=seed) for seed, name in enumerate("abc")}


def piece(offset: int, num_bytes: int, file: str = "a") -> FileRange:
    return FileRange(file=Path(file), offset_bytes=offset, num_bytes=num_bytes)


@st.composite
def units(draw: st.DrawFn) -> list[FileRange]:
    """Ranges in up to three files, in any order, apart by nothing to a megabyte; some overlap."""
    ranges = []
    for file in "abc":
        end = draw(st.integers(8, 20_000))
        for _ in range(draw(st.integers(0, 5))):
            num_bytes = draw(st.integers(0, 40_000))
            ranges.append(piece(end, num_bytes, file))
            gap = draw(st.sampled_from([0, 0, 1, 4095, 4097, 500_000, 700_000, -1000, -50_000]))
            end = max(0, end + num_bytes + gap)
    return draw(st.permutations(ranges or [piece(8, 1)]))


def perform(reads: Iterable[Read], slot: bytearray) -> None:
    for read in reads:
        data = FILES[read.file][read.offset_bytes : read.offset_bytes + read.num_bytes]
        slot[read.slot_offset_bytes : read.slot_offset_bytes + len(data)] = data


@given(ranges=units(), max_pages=st.integers(1, 20))
def test_the_chunks_bring_every_byte_of_every_range(
    ranges: list[FileRange], max_pages: int
) -> None:
    layout = lay_out(ranges)
    slot = bytearray(layout.num_bytes)
    max_bytes = max_pages * ALIGNMENT_BYTES
    chunks = [chunk for read in layout.reads for chunk in read.chunks(max_bytes)]
    assert max((chunk.num_bytes for chunk in chunks), default=0) <= max_bytes
    perform(chunks, slot)
    assert len(slot) == layout.num_bytes
    for wanted, begin in zip(ranges, layout.offsets_bytes, strict=True):
        data = FILES[wanted.file][wanted.offset_bytes : wanted.end_bytes]
        assert slot[begin : begin + wanted.num_bytes] == data


@given(ranges=units())
def test_every_read_is_aligned_and_has_its_own_place(ranges: list[FileRange]) -> None:
    end = 0
    for read in lay_out(ranges).reads:
        assert read.slot_offset_bytes == end
        end += read.num_bytes
        for size in (read.offset_bytes, read.num_bytes, read.slot_offset_bytes):
            assert size % ALIGNMENT_BYTES == 0
    assert end == lay_out(ranges).num_bytes


def test_neighbours_are_read_at_once_and_far_ones_apart() -> None:
    near = [piece(5000, 10_000), piece(15_000, 100)]
    assert len(lay_out(near).reads) == 1
    layout = lay_out([*near, piece(2_000_000, 100)])
    assert [read.offset_bytes for read in layout.reads] == [4096, 1_998_848]
    assert layout.num_bytes == 12_288 + 4096  # what lies between is not read


def test_the_same_range_twice_is_read_once() -> None:
    layout = lay_out([piece(5000, 100), piece(5000, 100)])
    assert layout.num_bytes == 4096
    assert layout.offsets_bytes == (904, 904)
