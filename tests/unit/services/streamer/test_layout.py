"""Reads against a plain copy of the tensors' bytes, out of files simulated in memory."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.checkpoint import TensorSpan, Unit
from services.streamer.layout import ALIGNMENT_BYTES, Read, lay_out, slot_bytes
from tests.support.checkpoints import random_bytes

FILE_BYTES = 4 << 20
FILES = {Path(name): random_bytes(FILE_BYTES, seed=seed) for seed, name in enumerate("abc")}


def span(name: str, offset: int, num_bytes: int, file: str = "a") -> TensorSpan:
    return TensorSpan(
        name=name,
        file=Path(file),
        offset_bytes=offset,
        num_bytes=num_bytes,
        dtype="U8",
        shape=(num_bytes,),
    )


@st.composite
def units(draw: st.DrawFn) -> Unit:
    """Tensors over up to three files, apart by anything from nothing to a megabyte and more."""
    tensors = []
    for file in "abc":
        end = draw(st.integers(8, 20_000))
        for index in range(draw(st.integers(0, 5))):
            num_bytes = draw(st.integers(0, 40_000))
            tensors.append(span(f"{file}{index}", end, num_bytes, file))
            end += num_bytes + draw(st.sampled_from([0, 0, 1, 4095, 4097, 500_000, 700_000]))
    tensors = tensors or [span("only", 8, 1)]
    return Unit(layer_index=draw(st.integers(0, 99)), tensors=tuple(draw(st.permutations(tensors))))


def perform(reads: list[Read], slot: bytearray) -> None:
    for read in reads:
        data = FILES[read.file][read.offset_bytes : read.offset_bytes + read.num_bytes]
        slot[read.slot_offset_bytes : read.slot_offset_bytes + len(data)] = data


@given(unit=units(), max_pages=st.integers(1, 20))
def test_the_chunks_bring_every_byte_of_every_tensor(unit: Unit, max_pages: int) -> None:
    layout = lay_out(unit)
    slot = bytearray(slot_bytes([layout]))
    max_bytes = max_pages * ALIGNMENT_BYTES
    chunks = [chunk for read in layout.reads for chunk in read.chunks(max_bytes)]
    assert max(chunk.num_bytes for chunk in chunks) <= max_bytes
    perform(chunks, slot)
    assert {tensor.span for tensor in layout.tensors} == set(unit.tensors)
    for tensor in layout.tensors:
        begin = tensor.slot_offset_bytes
        wanted = FILES[tensor.span.file][tensor.span.offset_bytes :][: tensor.span.num_bytes]
        assert slot[begin : begin + tensor.span.num_bytes] == wanted


@given(unit=units())
def test_every_read_is_aligned_and_has_its_own_place(unit: Unit) -> None:
    end = 0
    for read in lay_out(unit).reads:
        assert read.slot_offset_bytes == end
        end += read.num_bytes
        for size in (read.offset_bytes, read.num_bytes, read.slot_offset_bytes):
            assert size % ALIGNMENT_BYTES == 0
    assert end == lay_out(unit).num_bytes


def test_neighbours_are_read_at_once_and_far_ones_apart() -> None:
    near = [span("x", 5000, 10_000), span("y", 15_000, 100)]
    assert len(lay_out(Unit(layer_index=0, tensors=tuple(near))).reads) == 1
    far = [*near, span("z", 2_000_000, 100)]
    layout = lay_out(Unit(layer_index=0, tensors=tuple(far)))
    assert [read.offset_bytes for read in layout.reads] == [4096, 1_998_848]
    assert layout.num_bytes == 12_288 + 4096  # what lies between is not read


def test_a_slot_holds_the_largest_unit() -> None:
    layouts = [
        lay_out(Unit(layer_index=index, tensors=(span("x", 0, size),)))
        for index, size in enumerate((100, 9000, 5000))
    ]
    assert slot_bytes(layouts) == 12_288
