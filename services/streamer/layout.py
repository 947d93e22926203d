"""Where the bytes of each unit go in a slot, and which reads bring them there. Pure: no I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT_BYTES = 4096
"""Of file offsets, lengths and memory in direct reads."""
_MAX_GAP_BYTES = 64 << 10
"""Ranges that lie nearer than this are read together, with what lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class FileRange:
    """Consecutive bytes of a file."""

    file: Path
    offset_bytes: int
    num_bytes: int

    @property
    def end_bytes(self) -> int:
        """From the start of the file."""
        return self.offset_bytes + self.num_bytes


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
class UnitLayout:
    """One unit in a slot."""

    reads: tuple[Read, ...]
    offsets_bytes: tuple[int, ...]
    """Where each of the unit's ranges begins in the slot."""

    @property
    def num_bytes(self) -> int:
        """Read from storage, and taken in the slot."""
        return sum(read.num_bytes for read in self.reads)


def lay_out(ranges: Sequence[FileRange]) -> UnitLayout:
    """Place a unit's ranges, in as few reads as their order in the files allows."""
    reads: list[Read] = []
    places: dict[FileRange, int] = {}
    slot_offset = 0
    for group in _neighbours(ranges):
        begin = _round_down(group[0].offset_bytes)
        end = _round_up(max(member.end_bytes for member in group))
        reads.append(
            Read(
                file=group[0].file,
                offset_bytes=begin,
                num_bytes=end - begin,
                slot_offset_bytes=slot_offset,
            )
        )
        for member in group:
            places[member] = slot_offset + member.offset_bytes - begin
        slot_offset += end - begin
    return UnitLayout(reads=tuple(reads), offsets_bytes=tuple(places[r] for r in ranges))


def _neighbours(ranges: Sequence[FileRange]) -> Iterator[list[FileRange]]:
    """Ranges that one read can bring, in file order; they may overlap."""
    group: list[FileRange] = []
    end = 0
    for member in sorted(ranges):
        if group and (member.file != group[0].file or member.offset_bytes - end > _MAX_GAP_BYTES):
            yield group
            group = []
        end = max(end, member.end_bytes) if group else member.end_bytes
        group.append(member)
    if group:
        yield group


def _round_down(offset: int) -> int:
    return offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _round_up(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
