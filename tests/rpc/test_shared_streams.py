"""Several targets and one streamer: equal sweeps share a ring and its reads, others do not."""

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.model.sweep_plan import SweepPlan
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import invoke, open_channel
from services.target.weight_feed import WeightFeed
from tests.support.checkpoints import layer_tensors, write_single
from tests.support.eventually import assert_eventually
from tests.support.streamer_rig import (
    Unit,
    WatchedReads,
    feed_from,
    num_mappings,
    release_all,
    rings_in,
    streamer_of,
    sweep,
    units_of,
)

TENSORS = layer_tensors([[8_192]] * 6)  # over three blocks each: they begin within one
UNITS = units_of(TENSORS)
U = len(UNITS)
BYTES_PER_UNIT = 3 * 4096
NUM_PROBES = 1
"""Reads that only ask for direct reads."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_single(tmp_path / "model", TENSORS)


def sweeps(
    feed: WeightFeed,
    plan: SweepPlan,
    num_sweeps: int,
    before_release: Callable[[], object] = lambda: None,
) -> list[list[Unit]]:
    """Several sweeps without a pause. On a compute thread."""
    return [sweep(feed, plan, before_release=before_release) for _ in range(num_sweeps)]


def begin(feed: WeightFeed, plan: SweepPlan, num_units: int) -> None:
    """Begin a sweep, give some units back and keep the next one."""
    sweep(feed, plan, num_units=num_units)
    for index in range(plan.units[num_units].first_piece, plan.units[num_units].end_piece):
        feed.acquire(index)


def finish(feed: WeightFeed, plan: SweepPlan, num_units: int) -> None:
    """Go on from where `begin` stopped."""
    first = plan.units[num_units].end_piece
    release_all(feed, range(plan.units[num_units].first_piece, first))
    for index in range(first, plan.units[-1].end_piece):
        feed.acquire(index)
        feed.release(index)
    feed.end_sweep(0)


async def test_what_two_targets_sweep_together_is_read_once(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    num_sweeps, num_slots = 5, 2
    both_hold_a_unit = threading.Barrier(2, timeout=30)
    async with (
        streamer_of(model, address, shared_memory) as registry,
        feed_from(address, model, num_slots=num_slots) as one,
        feed_from(address, model, num_slots=num_slots) as two,
    ):
        assert len(rings_in(shared_memory)) == 1
        results = await asyncio.gather(
            *(
                asyncio.to_thread(sweeps, feed, plan, num_sweeps, both_hold_a_unit.wait)
                for feed in (one, two)
            )
        )
        assert results == [[UNITS] * num_sweeps] * 2
        num_units = num_sweeps * U + num_slots  # the slots are filled for the sweep that follows
        await assert_eventually(
            lambda: registry.reader.meter.num_bytes == num_units * BYTES_PER_UNIT
        )


async def test_the_streamer_tells_what_it_has_read_and_for_how_many(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with (
        streamer_of(model, address, shared_memory) as registry,
        feed_from(address, model) as feed,
        feed_from(address, model, num_slots=1),
        open_channel(address) as channel,
    ):
        await asyncio.to_thread(sweep, feed, plan)
        num_units = U + 3 + 1
        await assert_eventually(
            lambda: registry.reader.meter.num_bytes == num_units * BYTES_PER_UNIT
        )
        info = await invoke(
            streamer_pb2_grpc.StreamerStub(channel).GetStreamer,
            streamer_pb2.GetStreamerRequest(),
            peer="streamer",
            timeout_s=10,
        )
    assert info.name == "model"
    assert info.bytes_read_total == num_units * BYTES_PER_UNIT
    assert info.busy_ns_total > 0
    assert info.num_sessions == 2


@pytest.mark.parametrize("num_slots", [1, 2, 3, U])
async def test_a_slot_waits_for_the_slower_of_two_targets(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, num_slots: int
) -> None:
    reads = WatchedReads()
    async with (
        streamer_of(model, address, shared_memory, chunk_bytes=4096, read_into=reads),
        feed_from(address, model, num_slots=num_slots) as fast,
        feed_from(address, model, num_slots=num_slots) as slow,
    ):
        num_leases = 0

        def wait_until_the_streamer_is_as_far_ahead_as_it_gets() -> None:
            nonlocal num_leases
            reads.wait_for(NUM_PROBES + (num_leases + num_slots) * 3)
            num_leases += 1

        of_fast, of_slow = await asyncio.gather(
            asyncio.to_thread(sweeps, fast, plan, 6),
            asyncio.to_thread(
                sweeps, slow, plan, 3, wait_until_the_streamer_is_as_far_ahead_as_it_gets
            ),
        )
        assert of_fast == [UNITS] * 6
        assert of_slow == [UNITS] * 3


async def test_a_target_that_runs_ahead_into_its_next_sweep_never_changes_what_another_holds(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model, num_slots=U) as fast,
        feed_from(address, model, num_slots=U) as slow,
    ):
        await asyncio.to_thread(begin, slow, plan, 0)
        assert await asyncio.to_thread(sweep, fast, plan) == UNITS
        ahead = asyncio.ensure_future(asyncio.to_thread(sweeps, fast, plan, 3))
        await asyncio.to_thread(finish, slow, plan, 0)
        assert await asyncio.to_thread(sweep, slow, plan) == UNITS
        assert await ahead == [UNITS] * 3


async def test_a_target_sweeps_while_the_one_it_shares_with_rests(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model) as busy,
        feed_from(address, model) as resting,
    ):
        assert await asyncio.to_thread(sweep, resting, plan) == UNITS
        assert await asyncio.to_thread(sweeps, busy, plan, 4) == [UNITS] * 4
        assert await asyncio.to_thread(sweep, resting, plan) == UNITS


@pytest.mark.parametrize("num_units", [0, 1, U - 1])
async def test_a_target_that_comes_late_gets_a_whole_sweep(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, num_units: int
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model) as early,
        feed_from(address, model) as late,
    ):
        await asyncio.to_thread(begin, early, plan, num_units)
        sweeping = asyncio.ensure_future(asyncio.to_thread(sweeps, late, plan, 2))
        await asyncio.to_thread(finish, early, plan, num_units)
        assert await asyncio.to_thread(sweep, early, plan) == UNITS
        assert await sweeping == [UNITS] * 2


@pytest.mark.parametrize("num_units", [0, 1, U - 1])
async def test_a_target_that_leaves_in_mid_sweep_holds_up_nobody(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, num_units: int
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as other:
        async with feed_from(address, model) as leaving:
            await asyncio.to_thread(begin, leaving, plan, num_units)
            sweeping = asyncio.ensure_future(asyncio.to_thread(sweeps, other, plan, 2))
        assert await sweeping == [UNITS] * 2
        async with feed_from(address, model) as another:
            assert len(rings_in(shared_memory)) == 1
            assert await asyncio.to_thread(sweep, another, plan) == UNITS


async def test_targets_with_other_plans_have_rings_of_their_own(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    partly = plan.keeping(2 * plan.units[0].num_bytes)
    assert len(partly.streamed_units) == U - 2
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model) as one,
        feed_from(address, model, plan=partly) as two,
        feed_from(address, model, num_slots=1) as three,
    ):
        assert len(rings_in(shared_memory)) == 3
        expected = [unit for index, unit in enumerate(UNITS) if index not in partly.resident_units]
        for _ in range(2):
            results = await asyncio.gather(
                asyncio.to_thread(sweep, one, plan),
                asyncio.to_thread(sweep, two, partly),
                asyncio.to_thread(sweep, three, plan),
            )
            assert list(results) == [UNITS, expected, UNITS]


async def test_a_read_error_fails_the_sweeps_of_both_and_both_recover(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    reads = WatchedReads()
    reads.fail_at(NUM_PROBES + 4, errno.EIO)
    async with (
        streamer_of(model, address, shared_memory, read_into=reads),
        feed_from(address, model, num_slots=2) as one,
        feed_from(address, model, num_slots=2) as two,
    ):
        both_hold_a_unit = threading.Barrier(2, timeout=30)
        failures = await asyncio.gather(
            *(
                asyncio.to_thread(sweep, feed, plan, before_release=both_hold_a_unit.wait)
                for feed in (one, two)
            ),
            return_exceptions=True,
        )
        messages = [str(failure) for failure in failures]
        del failures  # their tracebacks hold tensors on the ring
        assert messages == ["model.safetensors cannot be read: Input/output error"] * 2
        for _ in range(2):
            assert await asyncio.gather(
                *(asyncio.to_thread(sweep, feed, plan) for feed in (one, two))
            ) == [UNITS, UNITS]
        assert len(rings_in(shared_memory)) == 1
        await assert_eventually(lambda: num_mappings(shared_memory) == 3)
