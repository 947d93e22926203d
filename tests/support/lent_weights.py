"""A lender of weights that notices misuse: reads from the files, poisons what it gets back."""

from collections import deque

import torch
from torch import Tensor

from headrace.errors import PeerUnavailable
from headrace.model.sweep_plan import Piece, SweepPlan

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LentWeights:
    """Lends the streamed pieces of a plan, each once a sweep and in order, in memory of their own.

    What is released turns to NaN: whoever still computes with it shows it.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._pieces: dict[int, Piece] = {
            unit.first_piece + index: piece
            for unit in plan.streamed_units
            for index, piece in enumerate(unit.pieces)
        }
        self._lent: dict[int, Tensor] = {}
        self._to_come: deque[int] = deque()
        self.fails_at: int | None = None
        """Index of a piece that cannot be lent."""

    @property
    def piece_indices(self) -> list[int]:
        """Of everything that a sweep borrows."""
        return sorted(self._pieces)

    @property
    def lent(self) -> list[Tensor]:
        """What is acquired and not released."""
        return list(self._lent.values())

    def begin_sweep(self) -> None:
        """Start at the first piece, whatever became of the last sweep."""
        for piece_index in list(self._lent):
            self._take_back(piece_index)
        self._to_come = deque(sorted(self._pieces))

    def end_sweep(self) -> None:
        """Check that everything was used and given back."""
        assert not self._to_come, f"not used: {list(self._to_come)}"
        assert not self._lent, f"not released: {list(self._lent)}"

    def acquire(self, piece_index: int) -> Tensor:
        """See WeightSource."""
        assert self._to_come
        assert piece_index == self._to_come.popleft()
        if piece_index == self.fails_at:
            raise PeerUnavailable("the streamer does not answer")
        self._lent[piece_index] = self.read(self._pieces[piece_index])
        return self._lent[piece_index]

    def read(self, piece: Piece) -> Tensor:
        """See Weights."""
        with piece.span.file.open("rb") as file:
            file.seek(piece.offset_bytes)
            data = bytearray(file.read(piece.num_bytes))
        rows = torch.frombuffer(data, dtype=_DTYPES[piece.span.dtype])
        return rows.view(piece.num_rows, piece.num_columns)

    def release(self, piece_index: int) -> None:
        """See WeightSource."""
        assert piece_index == next(iter(self._lent)), "pieces are released in order"
        self._take_back(piece_index)

    @torch.inference_mode()
    def _take_back(self, piece_index: int) -> None:
        self._lent.pop(piece_index).fill_(torch.nan)
