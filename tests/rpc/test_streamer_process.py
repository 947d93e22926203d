"""The streamer and its targets as processes that are stopped and killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.errors import PeerUnavailable
from headrace.model.sweep_plan import SweepPlan
from services.target.weight_feed import WeightFeed
from tests.support.checkpoints import layer_tensors, write_single
from tests.support.eventually import assert_eventually
from tests.support.streamer_rig import (
    Unit,
    end,
    feed_from,
    is_empty,
    num_mappings,
    release_all,
    rings_in,
    start_streamer_process,
    streamer_of,
    sweep,
    units_of,
)

TENSORS = layer_tensors([[20_000, 30], [9_000], [4_096], [50_002], [1_234, 1_554]])
UNITS = units_of(TENSORS)

TARGET = """
import asyncio, sys
from pathlib import Path
from tests.support.streamer_rig import feed_from
async def main():
    async with feed_from(sys.argv[1], Path(sys.argv[2])) as feed:
        await asyncio.to_thread(feed.begin_sweep, 0, [])
        await asyncio.to_thread(feed.acquire, 0)
        print("holding", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_single(tmp_path / "model", TENSORS)


@asynccontextmanager
async def target_that_holds_a_lease(
    address: str, model: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is killed at the end, if not before."""
    target = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TARGET, address, str(model), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert target.stdout is not None
        assert await target.stdout.readline() == b"holding\n"
        yield target
    finally:
        if target.returncode is None:
            target.kill()
        await target.communicate()


async def test_a_killed_target_frees_its_ring(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory):
        async with target_that_holds_a_lease(address, model) as target:
            assert num_mappings(shared_memory) == 1
            target.kill()
            await assert_eventually(lambda: num_mappings(shared_memory) == 0)
            assert is_empty(shared_memory)
        assert target.returncode == -signal.SIGKILL


async def test_a_killed_target_does_not_hold_up_the_one_that_shares_its_ring(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        async with target_that_holds_a_lease(address, model) as target:
            assert len(rings_in(shared_memory)) == 1
            sweeping = asyncio.ensure_future(asyncio.to_thread(sweep, feed, plan))
            target.kill()
            assert await sweeping == UNITS
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_a_killed_streamer_fails_the_sweep_and_another_one_serves_the_next(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    streamer = await start_streamer_process(model, address, shared_memory)
    try:
        async with feed_from(address, model) as feed:
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS

            with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                await asyncio.to_thread(
                    sweep, feed, plan, before_release=lambda: _kill(streamer.pid)
                )
            await end(streamer)
            assert streamer.returncode == -signal.SIGKILL
            with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                await asyncio.to_thread(sweep, feed, plan)
            (abandoned,) = rings_in(shared_memory)
            streamer = await start_streamer_process(model, address, shared_memory)
            assert await _sweep_once_it_answers(feed, plan) == UNITS
            assert num_mappings(shared_memory, streamer.pid) == 1
            assert not abandoned.exists()
            streamer.terminate()
            assert await streamer.wait() == 0
    finally:
        await end(streamer)
    assert is_empty(shared_memory)


@pytest.mark.parametrize("is_sweeping", [False, True])
async def test_a_streamer_told_to_stop_ends_its_sessions_at_once_and_quietly(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, is_sweeping: bool
) -> None:
    streamer = await start_streamer_process(model, address, shared_memory)
    try:
        async with feed_from(address, model) as feed:
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS
            if is_sweeping:
                await asyncio.to_thread(feed.begin_sweep, 1, [])
                await asyncio.to_thread(feed.acquire, 0)
            streamer.terminate()
            assert await streamer.wait() == 0
            if is_sweeping:  # told so by the streamer: it did not wait until calls are cancelled
                with pytest.raises(PeerUnavailable, match="the streamer is stopping"):
                    await asyncio.to_thread(finish, feed, plan)
            with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                await asyncio.to_thread(sweep, feed, plan)
    finally:
        log = await end(streamer)
    assert "stopping on a signal" in log
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert is_empty(shared_memory)


def finish(feed: WeightFeed, plan: SweepPlan) -> None:
    """Go through the units that follow a sweep's first."""
    release_all(feed, range(plan.units[0].end_piece))
    for unit in plan.units[1:]:
        for index in range(unit.first_piece, unit.end_piece):
            feed.acquire(index)
        release_all(feed, range(unit.first_piece, unit.end_piece))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the second time
        os.kill(pid, signal.SIGKILL)


async def _sweep_once_it_answers(feed: WeightFeed, plan: SweepPlan) -> list[Unit]:
    while True:
        try:
            return await asyncio.to_thread(sweep, feed, plan)
        except PeerUnavailable:
            await asyncio.to_thread(lambda: None)
