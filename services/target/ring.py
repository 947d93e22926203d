"""The streamer's slots, mapped into the target."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import PeerUnavailable
from headrace.rpc import streamer_pb2
from headrace.shared_memory import map_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedUnit:
    """A unit in a slot, valid until its release."""

    slot: Tensor
    """[bytes] uint8, on the shared memory."""
    offsets_bytes: tuple[int, ...]
    """Where each of the unit's slices begins in the slot."""
    num_bytes: int
    """Read from storage for it."""


class Ring:
    """The memory goes when the last tensor on it does."""

    def __init__(self, layout: streamer_pb2.RingLayout) -> None:
        """Map the slots.

        Raises:
            PeerUnavailable: They are not on this host.
        """
        self.slot_bytes = layout.slot_bytes
        self._num_bytes = [unit.num_bytes for unit in layout.units]
        self._offsets = [tuple(unit.slice_offsets_bytes) for unit in layout.units]
        try:
            descriptor = os.open(layout.shared_memory_path, os.O_RDWR)
            try:
                memory = map_shared(descriptor, layout.slot_bytes * layout.num_slots)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise PeerUnavailable(
                f"the streamer's shared memory cannot be mapped ({os.strerror(error.errno or 0)}): "
                "run target and streamer on one host, with the same HEADRACE_SHM_DIR"
            ) from None
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        """[bytes] uint8, all slots."""

    @property
    def num_units(self) -> int:
        """Units of a sweep."""
        return len(self._num_bytes)

    @property
    def bytes_per_sweep(self) -> int:
        """What one sweep reads from storage."""
        return sum(self._num_bytes)

    def unit(self, unit_index: int, slot: int) -> LeasedUnit:
        """A unit in a slot."""
        begin = slot * self.slot_bytes
        return LeasedUnit(
            slot=self.memory[begin : begin + self._num_bytes[unit_index]],
            offsets_bytes=self._offsets[unit_index],
            num_bytes=self._num_bytes[unit_index],
        )
