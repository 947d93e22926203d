"""Which bytes in the slots are still to be compared with the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.model.checkpoint import TensorSpan
from headrace.model.integrity import Integrity


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSlice:
    """Consecutive bytes of one tensor, and their place in a slot."""

    span: TensorSpan
    offset_bytes: int
    """From the start of the tensor."""
    num_bytes: int
    slot_offset_bytes: int


class UnitChecks:
    """The units of one stream; what is right is remembered for all streams of the checkpoint."""

    def __init__(self, integrity: Integrity, units: Sequence[Sequence[PlacedSlice]]) -> None:
        """Describe the units.

        Args:
            integrity: Of the checkpoint.
            units: [U] the slices of each.
        """
        self._integrity = integrity
        self._units = units

    def pending(self, unit_index: int) -> list[PlacedSlice]:
        """What of a unit was never found right so far."""
        return [
            piece
            for piece in self._units[unit_index]
            if not self._integrity.is_checked(piece.span, piece.offset_bytes, piece.num_bytes)
        ]

    def check(self, piece: PlacedSlice, slot: memoryview) -> None:
        """Compare bytes in a slot with the manifest. Takes long: on a thread.

        Raises:
            CheckpointCorrupt: They differ.
            PeerUnavailable: What they share blocks with cannot be read.
        """
        end = piece.slot_offset_bytes + piece.num_bytes
        data = slot[piece.slot_offset_bytes : end]
        self._integrity.check(piece.span, piece.offset_bytes, data)
