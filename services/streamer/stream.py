"""One ring, filled in sweep order for as long as slots are free, across the ends of sweeps.

Targets whose sweeps use equal units are members of one stream: one read serves all of them. A pass
over all units is a cycle; a sweep joins the cycle that is at its first unit, or waits for the next.
Reads run on a thread pool; everything else on the event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from headrace.errors import HeadraceError, InvalidRequest
from services.streamer.integrity import UnitChecks
from services.streamer.layout import Read, UnitLayout
from services.streamer.reader import Reader
from services.streamer.ring import Ring

_RETURN_SHARE = 0.03
"""Of a cycle's time: how long the next one waits for members that swept in the last, so that they
share it too. The slots fill meanwhile, so the disk loses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A slot that holds one unit, until its release."""

    lease_id: int
    unit_index: int
    slot: int
    read_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Fill:
    """A slot, what is being read into it, and who has done with it."""

    slot: int
    reading: asyncio.Task[int]
    """Gives the time from the first read to the last."""
    released_by: set["Member"] = field(default_factory=set)


class Member:
    """One target: at most one sweep at a time."""

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self._next_id: int | None = None
        """Of the lease that follows; None between sweeps."""
        self._held: set[int] = set()
        self.bytes_leased = 0
        """Delivered in leases so far."""
        self.read_ns = 0
        """Sum over leases of the time from the first read to the last."""

    def begin_sweep(self) -> None:
        """Take part in a cycle.

        Raises:
            InvalidRequest: The last sweep has not ended.
        """
        if self._next_id is not None or self._held:
            raise InvalidRequest("a sweep begins when the last one has ended")
        self._next_id = self._stream.enter(self)

    async def next_lease(self) -> Lease:
        """The next unit of the sweep, once all of it is in its slot; between sweeps, waits.

        Raises:
            CheckpointCorrupt: A file is damaged.
            PeerUnavailable: A device failed.
        """
        while self._next_id is None:
            await self._stream.changed()
        lease = await self._stream.fetch(self._next_id)
        self._held.add(lease.lease_id)
        is_last = lease.unit_index == len(self._stream.layouts) - 1
        self._next_id = None if is_last else lease.lease_id + 1
        self.bytes_leased += self._stream.layouts[lease.unit_index].num_bytes
        self.read_ns += lease.read_ns
        return lease

    def release(self, lease_id: int) -> None:
        """Give a lease back.

        Raises:
            InvalidRequest: It is not out.
        """
        if lease_id not in self._held:
            raise InvalidRequest(f"lease {lease_id} is not out")
        self._held.discard(lease_id)
        self._stream.release(lease_id, self)

    def leave(self) -> None:
        """Give everything back, and be no member any more."""
        self._stream.leave(self)


class Stream:
    """A ring and its members."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        ring: Ring,
        reader: Reader,
        pool: Executor,
        checks: UnitChecks,
        *,
        chunk_bytes: int,
    ) -> None:
        """Begin to read.

        Args:
            layouts: [U] units in sweep order, at least one.
            ring: Their slots.
            reader: Their files.
            pool: Threads that read, and check what was read.
            checks: What of the units is compared with the manifest.
            chunk_bytes: Largest single read.
        """
        self.layouts = layouts
        self.ring = ring
        self._failure: BaseException | None = None
        """Why nothing more is read; members that come to the end of what was are told."""
        self._is_closed = False
        self._reader = reader
        self._pool = pool
        self._checks = checks
        self._chunk_bytes = chunk_bytes
        self._free_slots = list(range(ring.num_slots))
        self._fills: dict[int, _Fill] = {}
        """By lease id, from the oldest that is not free to the next one to be read."""
        self._oldest_id = 0
        self._next_id = 0
        self._members: set[Member] = set()
        self._sweeping: set[Member] = set()
        """Those that take part in the oldest lease's cycle."""
        self._waiting: set[Member] = set()
        """Those that take part in the cycle after it."""
        self._expected: set[Member] = set()
        """Those of the last cycle that the first lease of this one waits for."""
        self._cycle_began_s = time.monotonic()
        self._changed = asyncio.Event()
        self._reading: set[asyncio.Task[int]] = set()
        self._fill()

    @property
    def is_failed(self) -> bool:
        """Whether nobody may join any more."""
        return self._failure is not None

    @property
    def num_members(self) -> int:
        """Targets that are connected."""
        return len(self._members)

    def join(self) -> Member:
        """A new member."""
        member = Member(self)
        self._members.add(member)
        return member

    def enter(self, member: Member) -> int:
        """Let a member's sweep begin; the id of its first lease."""
        self._expected.discard(member)
        self._notify()
        if self._is_at_first_unit and member not in self._sweeping:
            if not self._sweeping:
                self._cycle_began_s = time.monotonic()
            self._sweeping.add(member)
            return self._oldest_id
        self._waiting.add(member)
        return self._next_cycle_id

    async def fetch(self, lease_id: int) -> Lease:
        """The lease of that id, once its unit is read.

        Raises:
            CheckpointCorrupt: A file is damaged.
            PeerUnavailable: A device failed.
        """
        num_units = len(self.layouts)
        while lease_id not in self._fills or (lease_id % num_units == 0 and self._expected):
            await self.changed()
        fill = self._fills[lease_id]
        read_ns = await asyncio.shield(fill.reading)
        return Lease(
            lease_id=lease_id, unit_index=lease_id % num_units, slot=fill.slot, read_ns=read_ns
        )

    async def changed(self) -> None:
        """Return when a sweep began or a slot is being filled.

        Raises:
            CheckpointCorrupt: A file is damaged: no slot will be filled any more.
            PeerUnavailable: A device failed, likewise.
        """
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()

    def release(self, lease_id: int, member: Member) -> None:
        """Note that a member has done with a slot."""
        self._fills[lease_id].released_by.add(member)
        self._collect()

    def leave(self, member: Member) -> None:
        """Forget a member; a cycle that nobody follows any more ends."""
        for members in (self._members, self._sweeping, self._waiting, self._expected):
            members.discard(member)
        if not self._sweeping and not self._is_at_first_unit:
            end = self._next_cycle_id
            while self._oldest_id < min(end, self._next_id):
                self._free_oldest()
            self._oldest_id, self._next_id = end, max(end, self._next_id)
            self._begin_cycle(set())
        self._collect()

    def fail(self, reason: BaseException) -> None:
        """Read nothing more; members that come to the end of what was read are told why."""
        self._failure = reason
        self._notify()

    def close(self) -> None:
        """Drop the reads that have not begun; those that run keep the memory until they end."""
        self._is_closed = True
        for reading in self._reading:
            reading.cancel()
        self._fills.clear()  # tracebacks of reads would keep the memory, in a circle
        self._failure = None
        self.ring.close()

    @property
    def _is_at_first_unit(self) -> bool:
        return self._oldest_id % len(self.layouts) == 0

    @property
    def _next_cycle_id(self) -> int:
        """First lease id of the cycle after the oldest lease's."""
        num_units = len(self.layouts)
        return (self._oldest_id // num_units + 1) * num_units

    def _collect(self) -> None:
        """Free the slots that everyone has done with, and fill them anew."""
        while self._sweeping and self._oldest_id in self._fills:
            if not self._sweeping <= self._fills[self._oldest_id].released_by:
                break
            self._free_oldest()
            if self._is_at_first_unit:
                self._begin_cycle(self._sweeping - self._waiting)
        self._fill()

    def _begin_cycle(self, expected: set[Member]) -> None:
        """Let those sweep that wait for it, and give the others a moment to return."""
        now_s = time.monotonic()
        window_s = _RETURN_SHARE * (now_s - self._cycle_began_s)
        self._cycle_began_s = now_s
        self._sweeping, self._waiting, self._expected = self._waiting, set(), expected
        if expected:
            asyncio.get_running_loop().call_later(window_s, self._expect_no_longer, expected)
        self._notify()

    def _expect_no_longer(self, expected: set[Member]) -> None:
        expected.clear()
        self._notify()

    def _free_oldest(self) -> None:
        """Take a slot back, at the latest when what is being read into it is there."""
        fill = self._fills.pop(self._oldest_id)
        self._oldest_id += 1
        if fill.reading.done():
            self._free_slots.append(fill.slot)
        else:
            fill.reading.add_done_callback(lambda _: self._take_back(fill.slot))

    def _take_back(self, slot: int) -> None:
        self._free_slots.append(slot)
        self._fill()

    def _fill(self) -> None:
        """Begin to read into every free slot."""
        while self._free_slots and not self.is_failed and not self._is_closed:
            slot = self._free_slots.pop(0)
            unit_index = self._next_id % len(self.layouts)
            reading = asyncio.ensure_future(self._read(unit_index, slot))
            reading.add_done_callback(self._ended)
            self._reading.add(reading)
            self._fills[self._next_id] = _Fill(slot=slot, reading=reading)
            self._next_id += 1
            self._notify()

    async def _read(self, unit_index: int, slot: int) -> int:
        """Bring a unit into a slot and check it; the time from the first read to the last."""
        memory = self.ring.slot(slot)
        chunks = [c for r in self.layouts[unit_index].reads for c in r.chunks(self._chunk_bytes)]
        futures = [self._pool.submit(self._timed_read, chunk, memory) for chunk in chunks]
        times = await asyncio.gather(*map(asyncio.wrap_future, futures))
        await self._check(unit_index, memory)
        return max(end for _, end in times) - min(begin for begin, _ in times)

    async def _check(self, unit_index: int, memory: memoryview) -> None:
        """Compare what is read for the first time with the manifest."""
        pending = self._checks.pending(unit_index)
        futures = [self._pool.submit(self._checks.check, piece, memory) for piece in pending]
        await asyncio.gather(*map(asyncio.wrap_future, futures))

    def _timed_read(self, read: Read, memory: memoryview) -> tuple[int, int]:
        """On a reader thread."""
        began_ns = time.perf_counter_ns()
        self._reader.read(read, memory)
        return began_ns, time.perf_counter_ns()

    def _ended(self, reading: asyncio.Task[int]) -> None:
        self._reading.discard(reading)
        failure = None if reading.cancelled() else reading.exception()
        if isinstance(failure, HeadraceError):
            failure.__traceback__ = failure.__context__ = None  # frames would keep the memory
        if failure is not None:
            self.fail(failure)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
