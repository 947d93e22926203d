"""What every operation can do: tell its weights, be recorded, run on borrowed ones."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from headrace.model.sweep_plan import Piece, WeightUse


class WeightSource(Protocol):
    """Lends the pieces of a sweep, each once, in order."""

    def acquire(self, piece_index: int) -> Tensor:
        """[rows, columns] in the type of the file, valid until its release; waits until read."""

    def release(self, piece_index: int) -> None:
        """End the use of a piece."""


class Weights(WeightSource, Protocol):
    """Lends the pieces of a sweep, and reads what operations keep beside them."""

    def read(self, piece: Piece) -> Tensor:
        """[rows, columns] of a small piece, in the type of the file, to stay."""


class Operation(Protocol):
    """A module of a decoder and the large parameters that it alone owns."""

    parameter_names: frozenset[str]
    """Those that it borrows."""

    def uses(self) -> list[WeightUse]:
        """What one call of the module needs, in order."""

    def record(self, called: Callable[[], None]) -> None:
        """From now on compute nothing but a result of the right shape, and tell of each call."""

    def borrow(self, pieces: Sequence[range], weights: Weights) -> None:
        """From now on compute with borrowed weights.

        Args:
            pieces: Of each of `uses`, the indices of the pieces that it was cut into.
            weights: Lends them.
        """
