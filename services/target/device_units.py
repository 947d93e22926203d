"""Units on a device of their own memory: copied from the slots ahead of the sweep that computes.

The streamer's slots are registered as pinned memory, so that copies run beside everything else. A
thread takes each lease, copies the unit to the device on a stream of its own and gives the lease
back, as long as device slots are free: the copy of unit i + 1 runs under the compute of unit i.
"""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.errors import HeadraceError, PeerUnavailable
from services.target.feed_session import FeedSession
from services.target.ring import LeasedUnit

_NUM_SLOTS = 3
"""On the device: one to compute on, one that is full, one to copy to."""


class DeviceUnits:
    """What one session lends, on a device."""

    def __init__(self, session: FeedSession, device: torch.device) -> None:
        """Allocate the device's slots and register the streamer's.

        Raises:
            PeerUnavailable: The device refuses.
        """
        self.session = session
        self._api: Any = torch.get_device_module(device)
        self._api.synchronize()  # what an earlier session lent may still be computed on
        self._stream = self._api.Stream()
        self._ready: queue.SimpleQueue[LeasedUnit | HeadraceError] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[tuple[Tensor, Any] | None] = queue.SimpleQueue()
        """Slots, and the event after which each may be written to; None ends the copier."""
        for _ in range(_NUM_SLOTS):
            slot = torch.empty(session.ring.slot_bytes, dtype=torch.uint8, device=device)
            self._free.put((slot, None))
        self._held: Tensor | None = None
        self._num_ahead = 0
        """Units of the sweep under way that are not acquired yet."""
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copier")
        self._unpin = _pin(session.ring.memory, device)

    @property
    def is_between_sweeps(self) -> bool:
        """Whether a sweep may begin, as far as is known."""
        return self._num_ahead == 0 and self._held is None and self.session.is_between_sweeps

    def begin(self) -> None:
        """Begin to copy: a sweep was asked for."""
        self._num_ahead = self.session.ring.num_units
        self._copier.submit(self._copy_sweep)

    def acquire(self) -> LeasedUnit:
        """Wait for the sweep's next unit. On the compute thread.

        Raises:
            HeadraceError: The stream has failed.
        """
        unit = self._ready.get()
        if isinstance(unit, HeadraceError):
            self._ready.put(unit)  # for whoever asks next
            raise unit
        self._num_ahead -= 1
        self._held = unit.slot
        return unit

    def release(self) -> None:
        """Let the slot be written to once all that was computed so far is done."""
        assert self._held is not None
        is_free = self._api.Event()
        is_free.record()
        self._free.put((self._held, is_free))
        self._held = None

    async def close(self) -> None:
        """End the session; unregister the streamer's slots once no copy runs."""
        await self.session.close()
        self._free.put(None)
        await asyncio.to_thread(self._copier.shutdown)
        self._unpin()

    def _copy_sweep(self) -> None:
        """On the copier thread."""
        try:
            for _ in range(self.session.ring.num_units):
                unit = self.session.acquire()
                self._ready.put(self._copy(unit))
                self.session.release()
        except HeadraceError as error:
            self._ready.put(error)
        except RuntimeError as error:
            self._ready.put(PeerUnavailable(f"a copy to the device failed ({error})"))

    def _copy(self, unit: LeasedUnit) -> LeasedUnit:
        """The same unit on the device, all of it."""
        place = self._free.get()
        if place is None:
            raise PeerUnavailable("the session with the streamer has ended")
        slot, is_free = place
        with self._api.stream(self._stream):
            if is_free is not None:
                self._stream.wait_event(is_free)
            slot[: unit.num_bytes].copy_(unit.slot, non_blocking=True)
            is_there = self._api.Event()
            is_there.record()
        is_there.synchronize()
        return replace(unit, slot=slot)


def _pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
    """Register host memory with a CUDA device; how to undo it.

    Raises:
        PeerUnavailable: The device refuses.
    """
    if device.type != "cuda":
        return lambda: None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise PeerUnavailable(
            f"the slots cannot be registered with the device (CUDA error {int(status)}): raise the "
            "limit on locked memory (ulimit -l), or set HEADRACE_SLOTS to fewer"
        )
    return lambda: runtime.cudaHostUnregister(memory.data_ptr())
