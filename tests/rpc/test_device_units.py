"""Units copied to a device, with the processor in its place: the same threads, queues and ends."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from headrace.errors import CheckpointCorrupt
from services.target import weight_feed
from services.target.device_units import DeviceUnits
from tests.support.checkpoints import layer_tensors, write_single
from tests.support.streamer_rig import (
    feed_from,
    plan_of,
    streamer_of,
    sweep,
    units_of,
)

TENSORS = layer_tensors([[20_000, 30], [9_000, 40_000, 2], [4_096], [50_002], [1_234, 777 * 2]])
UNITS = units_of(TENSORS)


@pytest.fixture(autouse=True)
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processor be a device of its own memory."""
    monkeypatch.setattr(weight_feed, "units_on", lambda d, session: DeviceUnits(session, d))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_single(tmp_path / "model", TENSORS)
    os.utime(directory / "model.safetensors", ns=(0, 0))  # so that any write changes it
    return directory


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_every_sweep_brings_the_bytes_of_the_file(
    model: Path, address: str, shared_memory: Path, num_slots: int
) -> None:
    plan = plan_of(model)
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model, num_slots=num_slots) as feed,
    ):
        for _ in range(4):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_units_are_no_views_of_the_slots(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        await asyncio.to_thread(feed.begin_sweep, 0, [])
        piece = await asyncio.to_thread(feed.acquire, 0)
        assert feed._units is not None
        memory = feed._units.session.ring.memory
        begin = memory.data_ptr()
        assert not begin <= piece.data_ptr() < begin + memory.numel()
        assert torch.equal(piece.view(torch.uint8).flatten()[:4], _first_bytes(UNITS[0][0]))


async def test_a_sweep_that_was_cut_off_is_followed_by_a_whole_one(
    model: Path, address: str, shared_memory: Path
) -> None:
    plan = plan_of(model)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        for num_units in (1, 2, len(UNITS)):
            await asyncio.to_thread(sweep, feed, plan, num_units=num_units)
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_a_failed_read_fails_the_sweep(
    model: Path, address: str, shared_memory: Path
) -> None:
    plan = plan_of(model)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        os.truncate(model / "model.safetensors", 60_001)
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt):
                await asyncio.to_thread(sweep, feed, plan)


def _first_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data[:4]), dtype=torch.uint8)
