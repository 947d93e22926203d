"""One target's ring: filled in sweep order for as long as slots are free, across sweeps.

Reads run on a thread pool; everything else on the event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count

from headrace.errors import InvalidRequest
from services.streamer.layout import Read, UnitLayout
from services.streamer.reader import Reader
from services.streamer.ring import Ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slot that holds one unit, until its release."""

    lease_id: int
    unit_index: int
    slot: int
    read_ns: int


class Session:
    """Fills slots ahead of the target and takes them back."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        ring: Ring,
        reader: Reader,
        pool: Executor,
        *,
        chunk_bytes: int,
    ) -> None:
        """Prepare; `fill` starts reading.

        Args:
            layouts: [U] units in sweep order.
            ring: Their slots.
            reader: Their files.
            pool: Threads that read.
            chunk_bytes: Largest single read.
        """
        self._layouts = layouts
        self._ring = ring
        self._reader = reader
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(ring.num_slots):
            self._free_slots.put_nowait(slot)
        self._filling: asyncio.Queue[_Fill] = asyncio.Queue(ring.num_slots)
        self._leased_slots: dict[int, int] = {}
        self._reads: set[asyncio.Future[None]] = set()
        self.bytes_read = 0
        """Delivered in leases so far."""
        self.read_ns = 0
        """Sum over leases of the time from the first read to the last."""

    async def fill(self) -> None:
        """Read unit after unit into free slots, for ever."""
        for lease_id in count():
            slot = await self._free_slots.get()
            unit_index = lease_id % len(self._layouts)
            reads = [self._start(read, slot) for read in self._chunks(unit_index)]
            await self._filling.put(
                _Fill(lease_id=lease_id, slot=slot, reads=reads, began_ns=time.perf_counter_ns())
            )

    async def next_lease(self) -> Lease:
        """The next unit in sweep order, once all of it is in its slot.

        Raises:
            CheckpointCorrupt: Its file is damaged.
            PeerUnavailable: Its device failed.
        """
        fill = await self._filling.get()
        await asyncio.gather(*fill.reads)
        unit_index = fill.lease_id % len(self._layouts)
        read_ns = time.perf_counter_ns() - fill.began_ns
        self.bytes_read += self._layouts[unit_index].num_bytes
        self.read_ns += read_ns
        self._leased_slots[fill.lease_id] = fill.slot
        return Lease(lease_id=fill.lease_id, unit_index=unit_index, slot=fill.slot, read_ns=read_ns)

    def release(self, lease_id: int) -> None:
        """Take a slot back.

        Raises:
            InvalidRequest: No such lease is out.
        """
        slot = self._leased_slots.pop(lease_id, None)
        if slot is None:
            raise InvalidRequest(f"lease {lease_id} is not out")
        self._free_slots.put_nowait(slot)

    def close(self) -> None:
        """Drop the reads that have not begun; those that run keep the memory until they end."""
        for read in self._reads:
            read.cancel()

    def _chunks(self, unit_index: int) -> list[Read]:
        reads = self._layouts[unit_index].reads
        return [chunk for read in reads for chunk in read.chunks(self._chunk_bytes)]

    def _start(self, read: Read, slot: int) -> asyncio.Future[None]:
        future = asyncio.wrap_future(
            self._pool.submit(self._reader.read, read, self._ring.slot(slot))
        )
        self._reads.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, read: asyncio.Future[None]) -> None:
        self._reads.discard(read)
        if not read.cancelled():
            read.exception()  # seen: the session may be over, and nobody waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fill:
    """A slot that is being filled."""

    lease_id: int
    slot: int
    reads: Sequence[asyncio.Future[None]]
    began_ns: int
