"""Who gets which lease when, and when a slot is filled anew."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest, PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.integrity import Integrity
from services.streamer.integrity import UnitChecks
from services.streamer.layout import FileRange, lay_out
from services.streamer.reader import Reader
from services.streamer.ring import Ring
from services.streamer.stream import Lease, Member, Stream
from tests.support.checkpoints import write_single
from tests.support.eventually import assert_eventually
from tests.support.streamer_rig import WatchedReads, is_empty, shared_memory_dir

UNIT_BYTES = 4096
NUM_PROBES = 1
"""Reads that only ask for direct reads."""


class Rig:
    """Streams of units, the i-th of which is full of the byte i."""

    def __init__(self, directory: Path, shared_memory: Path) -> None:
        self.reads = WatchedReads()
        self.shared_memory = shared_memory
        self._directory = directory
        self._pool = ThreadPoolExecutor(1)

    def stream(self, *, num_units: int, num_slots: int) -> Stream:
        data = b"".join(bytes([i]) * UNIT_BYTES for i in range(num_units))
        checkpoint = Checkpoint.open(write_single(self._directory, {"w": data}))
        (span,) = checkpoint.tensors.values()
        layouts = [
            lay_out(
                [
                    FileRange(
                        file=span.file,
                        offset_bytes=span.offset_bytes + i * UNIT_BYTES,
                        num_bytes=UNIT_BYTES,
                    )
                ]
            )
            for i in range(num_units)
        ]
        slot_bytes = max(layout.num_bytes for layout in layouts)
        ring = Ring(self.shared_memory, slot_bytes=slot_bytes, num_slots=num_slots)
        ring.allocate()
        return Stream(
            layouts,
            ring,
            Reader(checkpoint.files, self.reads),
            self._pool,
            UnitChecks(Integrity(checkpoint), [[]] * num_units),
            chunk_bytes=slot_bytes,
        )

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let no read begin meanwhile."""
        end = threading.Event()
        self._pool.submit(end.wait)
        try:
            yield
        finally:
            end.set()

    async def settle(self, num_reads: int) -> None:
        """Return when so many reads were made; one more would be a failure later."""
        await assert_eventually(lambda: self.reads.num_done == NUM_PROBES + num_reads)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    with shared_memory_dir() as shared_memory:
        rig = Rig(tmp_path, shared_memory)
        yield rig
        rig.close()


async def lease(member: Member) -> Lease:
    async with asyncio.timeout(10):
        return await member.next_lease()


async def turns() -> None:
    """Let the loop run what is ready, and what follows from it."""
    for _ in range(20):
        await asyncio.sleep(0)


async def assert_waits(member: Member) -> None:
    """That no lease comes, though the loop has run everything that was ready."""
    waiting = asyncio.ensure_future(member.next_lease())
    await turns()
    assert not waiting.done()
    waiting.cancel()


def content(stream: Stream, out: Lease) -> bytes:
    """What the slot of a lease holds of its unit."""
    (offset,) = stream.layouts[out.unit_index].offsets_bytes
    return bytes(stream.ring.slot(out.slot)[offset : offset + UNIT_BYTES])


async def run_sweep(member: Member, stream: Stream) -> list[int]:
    """Units of a sweep in order, each with its own bytes until its release."""
    member.begin_sweep()
    units = []
    for _ in stream.layouts:
        out = await lease(member)
        assert content(stream, out) == bytes([out.unit_index]) * UNIT_BYTES
        units.append(out.unit_index)
        member.release(out.lease_id)
    return units


@pytest.mark.parametrize("num_slots", [1, 2, 5])
async def test_sweep_after_sweep_brings_all_units_in_order(rig: Rig, num_slots: int) -> None:
    stream = rig.stream(num_units=5, num_slots=num_slots)
    member = stream.join()
    for _ in range(3):
        assert await run_sweep(member, stream) == [0, 1, 2, 3, 4]
    assert member.bytes_leased == 3 * sum(layout.num_bytes for layout in stream.layouts)


async def test_slots_are_filled_before_a_sweep_begins_but_not_lent(rig: Rig) -> None:
    stream = rig.stream(num_units=5, num_slots=3)
    await rig.settle(3)
    await assert_waits(stream.join())
    await rig.settle(3)


async def test_reads_go_on_across_the_end_of_a_sweep(rig: Rig) -> None:
    stream = rig.stream(num_units=4, num_slots=2)
    await run_sweep(stream.join(), stream)
    await rig.settle(4 + 2)


async def test_a_slot_is_free_when_all_who_sweep_have_released_it(rig: Rig) -> None:
    stream = rig.stream(num_units=4, num_slots=1)
    one, two = stream.join(), stream.join()
    one.begin_sweep()
    two.begin_sweep()
    of_one, of_two = await lease(one), await lease(two)
    assert of_one == of_two
    one.release(of_one.lease_id)
    await assert_waits(one)
    await rig.settle(1)
    two.release(of_two.lease_id)
    assert (await lease(one)).unit_index == 1


@pytest.mark.parametrize("num_units", [1, 3])
async def test_who_is_done_with_all_units_gets_them_anew_only_in_the_next_cycle(
    rig: Rig, num_units: int
) -> None:
    stream = rig.stream(num_units=num_units, num_slots=num_units)
    fast, slow = stream.join(), stream.join()
    slow.begin_sweep()
    held = await lease(slow)
    await run_sweep(fast, stream)
    fast.begin_sweep()
    await assert_waits(fast)  # all of it is in memory, but the slots are to be filled anew
    slow.release(held.lease_id)
    for _ in range(1, num_units):
        slow.release((await lease(slow)).lease_id)
    again = await lease(fast)
    assert (again.unit_index, again.lease_id) == (0, num_units)
    slow.leave()
    assert content(stream, again) == bytes(UNIT_BYTES)


async def test_who_comes_while_the_first_unit_is_out_shares_the_sweep(rig: Rig) -> None:
    stream = rig.stream(num_units=3, num_slots=1)
    early, late = stream.join(), stream.join()
    early.begin_sweep()
    first = await lease(early)
    late.begin_sweep()
    assert await lease(late) == first


async def test_who_comes_after_the_first_unit_waits_for_the_next_cycle(rig: Rig) -> None:
    stream = rig.stream(num_units=3, num_slots=2)
    early, late = stream.join(), stream.join()
    early.begin_sweep()
    early.release((await lease(early)).lease_id)
    late.begin_sweep()
    for _ in range(2):
        early.release((await lease(early)).lease_id)
    assert (await lease(late)).lease_id == 3


async def test_a_cycle_ends_when_the_last_who_follows_it_leaves(rig: Rig) -> None:
    stream = rig.stream(num_units=6, num_slots=2)
    leaving, waiting = stream.join(), stream.join()
    leaving.begin_sweep()
    leaving.release((await lease(leaving)).lease_id)
    waiting.begin_sweep()
    leaving.leave()
    assert [(await lease(waiting)).unit_index for _ in range(2)] == [0, 1]


async def test_a_slot_that_is_being_read_into_when_its_cycle_ends_is_not_used_before(
    rig: Rig,
) -> None:
    stream = rig.stream(num_units=6, num_slots=2)
    await rig.settle(2)
    leaving, staying = stream.join(), stream.join()
    leaving.begin_sweep()
    first = await lease(leaving)
    with rig.busy():
        leaving.release(first.lease_id)  # unit 2 is to be read there
        leaving.leave()
        staying.begin_sweep()
    for unit in range(2):
        out = await lease(staying)
        assert content(stream, out) == bytes([unit]) * UNIT_BYTES


async def test_a_sweep_begins_only_when_the_last_one_has_ended(rig: Rig) -> None:
    stream = rig.stream(num_units=2, num_slots=2)
    member = stream.join()
    member.begin_sweep()
    with pytest.raises(InvalidRequest, match="when the last one has ended"):
        member.begin_sweep()
    ids = [(await lease(member)).lease_id for _ in range(2)]
    with pytest.raises(InvalidRequest, match="when the last one has ended"):
        member.begin_sweep()
    for lease_id in ids:
        member.release(lease_id)
    member.begin_sweep()


async def test_a_lease_is_given_back_once_and_by_who_has_it(rig: Rig) -> None:
    stream = rig.stream(num_units=2, num_slots=2)
    member, other = stream.join(), stream.join()
    member.begin_sweep()
    lease_id = (await lease(member)).lease_id
    with pytest.raises(InvalidRequest, match="lease 0 is not out"):
        other.release(lease_id)
    member.release(lease_id)
    with pytest.raises(InvalidRequest, match="lease 0 is not out"):
        member.release(lease_id)


async def test_a_failed_read_is_told_to_all_members_at_rest_at_once(rig: Rig) -> None:
    rig.reads.fail_at(NUM_PROBES + 1, errno.EIO)
    stream = rig.stream(num_units=4, num_slots=2)
    for member in (stream.join(), stream.join()):
        with pytest.raises(PeerUnavailable, match="Input/output error"):
            await lease(member)
    assert stream.is_failed


async def test_what_was_read_before_a_failure_is_lent_and_then_the_failure_told(rig: Rig) -> None:
    rig.reads.fail_at(NUM_PROBES + 1, errno.EIO)
    stream = rig.stream(num_units=4, num_slots=2)
    member = stream.join()
    member.begin_sweep()
    assert (await lease(member)).unit_index == 0
    with pytest.raises(PeerUnavailable, match="Input/output error"):
        await lease(member)
    await rig.settle(2)  # nothing is read any more: the lease is still out


async def test_who_waits_for_the_next_cycle_of_a_failed_stream_is_told(rig: Rig) -> None:
    rig.reads.fail_at(NUM_PROBES + 2, errno.EIO)
    stream = rig.stream(num_units=4, num_slots=2)
    sweeping, waiting = stream.join(), stream.join()
    sweeping.begin_sweep()
    sweeping.release((await lease(sweeping)).lease_id)
    waiting.begin_sweep()
    await lease(sweeping)
    with pytest.raises(PeerUnavailable):
        await lease(sweeping)
    sweeping.leave()
    with pytest.raises(PeerUnavailable, match="Input/output error"):
        await lease(waiting)


async def test_a_closed_stream_reads_nothing_more_and_leaves_nothing(rig: Rig) -> None:
    stream = rig.stream(num_units=4, num_slots=2)
    await rig.settle(2)
    member = stream.join()
    member.begin_sweep()
    with rig.busy():
        member.release((await lease(member)).lease_id)
        await asyncio.sleep(0)  # a read of unit 2 waits for a thread
        member.leave()
        stream.close()
        await assert_eventually(lambda: is_empty(rig.shared_memory))
        await turns()
    await asyncio.to_thread(rig.close)
    await rig.settle(2)
