"""What a sweep reads, in which order, and how it is cut into units. Pure: no I/O, no torch.

A sweep uses the model's weights in one fixed order. The order is cut into pieces (rows of one
tensor) and packed into units of about equal size, whatever the sizes of layers and matrices: a unit
is what one slot holds and one lease lends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from headrace.model.checkpoint import TensorSpan

_ROW_GRAIN = 16
"""Matrices are cut at multiples of this many rows: kernels work on blocks of rows."""
_MIN_FILL = 4
"""A matrix is cut to fill a unit only if at least a quarter of the unit is still free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive rows of a tensor, seen as [rows, columns] with its last dimension as columns."""

    span: TensorSpan
    begin_row: int
    end_row: int

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return self.end_row - self.begin_row

    @property
    def num_columns(self) -> int:
        """Columns of the tensor."""
        return self.span.shape[-1] if self.span.shape else 1

    @property
    def offset_bytes(self) -> int:
        """From the start of the file."""
        return self.span.offset_bytes + self.begin_row * self._row_bytes

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.num_rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        num_rows = prod(self.span.shape[:-1])
        return self.span.num_bytes // num_rows if num_rows else 0

    def cut(self, num_rows: int) -> tuple["Piece", "Piece"]:
        """The first num_rows rows, and the others."""
        row = self.begin_row + num_rows
        return (
            Piece(span=self.span, begin_row=self.begin_row, end_row=row),
            Piece(span=self.span, begin_row=row, end_row=self.end_row),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUse:
    """The weights that one operation needs, once a sweep."""

    pieces: tuple[Piece, ...]
    is_divisible: bool
    """Whether it can work through its rows one part after the other."""

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Pieces that are read and lent together."""

    first_piece: int
    """Index of its first piece in the sweep."""
    pieces: tuple[Piece, ...]

    @property
    def end_piece(self) -> int:
        """Index behind its last piece."""
        return self.first_piece + len(self.pieces)

    @property
    def num_bytes(self) -> int:
        """In the files, without alignment."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The units of a sweep in order, and which of them stay in memory."""

    units: tuple[Unit, ...]
    pieces_by_use: tuple[range, ...]
    """Indices of the pieces that each use was cut into."""
    resident_units: frozenset[int] = field(default_factory=frozenset)
    """Indices of the units that are never read again."""

    @classmethod
    def pack(cls, uses: Sequence[WeightUse], *, unit_bytes: int) -> "SweepPlan":
        """Cut a sweep into units.

        Args:
            uses: In the order of the sweep.
            unit_bytes: Size to aim at; a use that cannot be divided makes a larger unit.
        """
        packer = _Packer(unit_bytes)
        ranges = []
        for use in uses:
            begin = packer.num_pieces
            if use.is_divisible:
                for piece in use.pieces:
                    packer.add_divisible(piece)
            else:
                packer.add_whole(use.pieces)
            ranges.append(range(begin, packer.num_pieces))
        return cls(units=packer.finished(), pieces_by_use=tuple(ranges))

    def keeping(self, max_bytes: int) -> "SweepPlan":
        """The same with as many units resident as fit, spread evenly over the sweep.

        Evenly, so that between two of them there is always something to read ahead.
        """
        order = _spread(len(self.units))
        resident, left = set(), max_bytes
        for index in order:
            if self.units[index].num_bytes > left:
                break
            resident.add(index)
            left -= self.units[index].num_bytes
        return SweepPlan(
            units=self.units,
            pieces_by_use=self.pieces_by_use,
            resident_units=frozenset(resident),
        )

    @property
    def streamed_units(self) -> tuple[Unit, ...]:
        """Those that every sweep reads, in order."""
        return tuple(u for i, u in enumerate(self.units) if i not in self.resident_units)

    @property
    def streamed_bytes(self) -> int:
        """What a sweep reads, without alignment."""
        return sum(unit.num_bytes for unit in self.streamed_units)

    @property
    def resident_bytes(self) -> int:
        """What stays in memory of what a sweep uses."""
        return sum(self.units[index].num_bytes for index in self.resident_units)

    @property
    def max_unit_bytes(self) -> int:
        """Size of the largest unit that is streamed; 0 if none is."""
        return max((unit.num_bytes for unit in self.streamed_units), default=0)


class _Packer:
    """Fills one unit after the other."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._units: list[Unit] = []
        self._open: list[Piece] = []
        self._open_bytes = 0
        self.num_pieces = 0

    def add_divisible(self, piece: Piece) -> None:
        while piece.num_bytes > self._free:
            num_rows = self._rows_that_fit(piece)
            if num_rows == 0:
                self._close()
                continue
            head, piece = piece.cut(num_rows)
            self._put(head)
            self._close()
            if piece.num_rows == 0:
                return
        self._put(piece)

    def add_whole(self, pieces: Sequence[Piece]) -> None:
        if sum(piece.num_bytes for piece in pieces) > self._free:
            self._close()
        for piece in pieces:
            self._put(piece)

    def finished(self) -> tuple[Unit, ...]:
        self._close()
        return tuple(self._units)

    @property
    def _free(self) -> int:
        return max(0, self._unit_bytes - self._open_bytes)

    def _rows_that_fit(self, piece: Piece) -> int:
        """How much of a piece to put into the open unit; 0 to begin another one."""
        if self._open and self._free * _MIN_FILL < self._unit_bytes:
            return 0
        row_bytes = piece.num_bytes // piece.num_rows
        num_rows = self._free // row_bytes // _ROW_GRAIN * _ROW_GRAIN
        if num_rows == 0 and not self._open:
            num_rows = _ROW_GRAIN  # rows longer than a unit
        return min(num_rows, piece.num_rows)

    def _put(self, piece: Piece) -> None:
        self._open.append(piece)
        self._open_bytes += piece.num_bytes
        self.num_pieces += 1

    def _close(self) -> None:
        if self._open:
            first = self.num_pieces - len(self._open)
            self._units.append(Unit(first_piece=first, pieces=tuple(self._open)))
        self._open = []
        self._open_bytes = 0


def _spread(count: int) -> Iterator[int]:
    """All indices below count, such that any first few of them lie evenly apart.

    Multiples of the golden ratio, which the three-distance theorem makes even at every length.
    """
    taken: set[int] = set()
    position = 0.0
    while len(taken) < count:
        index = int(position * count)
        while index in taken:
            index = (index + 1) % count
        taken.add(index)
        yield index
        position = (position + 0.6180339887498949) % 1.0
