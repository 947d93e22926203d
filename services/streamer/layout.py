"""Where the weights of each unit go in a slot, and which reads bring them there. Pure: no I/O."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.model.checkpoint import TensorSpan, Unit

ALIGNMENT_BYTES = 4096
"""Of file offsets, lengths and memory in direct reads."""
_MAX_GAP_BYTES = 1 << 20
"""Tensors that lie nearer than this are read together, with what lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A contiguous, aligned piece of a file and its place in the slot."""

    file: Path
    offset_bytes: int
    num_bytes: int
    """May reach beyond the end of the file, up to the alignment."""
    slot_offset_bytes: int

    def chunks(self, max_bytes: int) -> Iterator["Read"]:
        """The same bytes in reads of at most max_bytes."""
        for begin in range(0, self.num_bytes, max_bytes):
            yield Read(
                file=self.file,
                offset_bytes=self.offset_bytes + begin,
                num_bytes=min(max_bytes, self.num_bytes - begin),
                slot_offset_bytes=self.slot_offset_bytes + begin,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor and where it begins in the slot."""

    span: TensorSpan
    slot_offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """One unit in a slot."""

    layer_index: int
    reads: tuple[Read, ...]
    tensors: tuple[PlacedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Read from storage, and taken in the slot."""
        return sum(read.num_bytes for read in self.reads)


def lay_out(unit: Unit) -> UnitLayout:
    """Place a unit's tensors, in as few reads as their order in the files allows."""
    reads: list[Read] = []
    tensors: list[PlacedTensor] = []
    slot_offset = 0
    for group in _neighbours(unit.tensors):
        begin = _round_down(group[0].offset_bytes)
        end = _round_up(group[-1].offset_bytes + group[-1].num_bytes)
        reads.append(
            Read(
                file=group[0].file,
                offset_bytes=begin,
                num_bytes=end - begin,
                slot_offset_bytes=slot_offset,
            )
        )
        tensors.extend(
            PlacedTensor(span=span, slot_offset_bytes=slot_offset + span.offset_bytes - begin)
            for span in group
        )
        slot_offset += end - begin
    return UnitLayout(layer_index=unit.layer_index, reads=tuple(reads), tensors=tuple(tensors))


def slot_bytes(layouts: Sequence[UnitLayout]) -> int:
    """A slot that holds any of the units."""
    return max(layout.num_bytes for layout in layouts)


def _neighbours(spans: Iterable[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Runs of tensors that one read can bring, in file order."""
    group: list[TensorSpan] = []
    for span in sorted(spans, key=lambda span: (span.file, span.offset_bytes, span.num_bytes)):
        if group and not _is_near(group[-1], span):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _is_near(earlier: TensorSpan, later: TensorSpan) -> bool:
    gap = later.offset_bytes - earlier.offset_bytes - earlier.num_bytes
    return earlier.file == later.file and gap <= _MAX_GAP_BYTES


def _round_down(offset: int) -> int:
    return offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
