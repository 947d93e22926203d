"""From the file to the target's tensors: a real streamer, a real feed, a unix socket between."""

import asyncio
import errno
import logging
import os
from pathlib import Path

import pytest

from headrace.errors import CheckpointCorrupt, InvalidRequest, PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.sweep_plan import Piece, SweepPlan, WeightUse
from services.target.weight_feed import WeightFeed
from tests.support.checkpoints import (
    layer_tensors,
    random_bytes,
    write_config,
    write_file,
    write_sharded,
    write_single,
)
from tests.support.eventually import assert_eventually
from tests.support.streamer_rig import (
    Unit,
    WatchedReads,
    bytes_of,
    feed_from,
    is_empty,
    num_mappings,
    only_buffered,
    plan_of,
    rings_in,
    small_memory_dir,
    streamer_of,
    sweep,
    units_of,
    whole,
)

TENSORS = layer_tensors([[20_000, 30], [9_000, 40_000, 2], [4_096], [50_002], [1_234, 777 * 2]])
UNITS = units_of(TENSORS)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_single(tmp_path / "model", TENSORS)
    os.utime(directory / "model.safetensors", ns=(0, 0))  # so that any write changes it
    return directory


@pytest.mark.parametrize("num_slots", [1, 2, 3, 99])
async def test_every_sweep_brings_the_bytes_of_the_file(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, num_slots: int
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model, num_slots=num_slots) as feed,
    ):
        for _ in range(4):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        assert feed.bytes_streamed == 4 * feed.bytes_per_sweep


async def test_a_layer_over_several_shards_arrives_whole(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    names = list(TENSORS)
    shards = {f"{i}.safetensors": {n: TENSORS[n] for n in names[i::3]} for i in (2, 0, 1)}
    model = write_sharded(tmp_path / "model", shards)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        assert await asyncio.to_thread(sweep, feed, plan_of(model)) == UNITS


async def test_a_matrix_cut_into_units_arrives_row_by_row(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    data = random_bytes(500 * 60 * 2)
    entry = {"dtype": "BF16", "shape": [500, 60], "data_offsets": [0, len(data)]}
    write_config(tmp_path / "model")
    write_file(tmp_path / "model/model.safetensors", {"w": entry}, data)
    piece = whole(Checkpoint.open(tmp_path / "model").tensors["w"])
    use = WeightUse(pieces=(piece,), is_divisible=True)
    plan = SweepPlan.pack([use], unit_bytes=8192)
    assert len(plan.units) > 5
    async with (
        streamer_of(tmp_path / "model", address, shared_memory),
        feed_from(address, tmp_path / "model", plan=plan) as feed,
    ):
        for _ in range(2):
            units = await asyncio.to_thread(sweep, feed, plan)
            assert b"".join(rows for unit in units for rows in unit) == data


async def test_tensors_at_odd_places_arrive_whole(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    header = {
        "first": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "model.layers.0.w": {"dtype": "F32", "shape": [3000], "data_offsets": [1, 12_001]},
    }
    data = random_bytes(12_001)
    write_config(tmp_path / "model")
    write_file(tmp_path / "model/model.safetensors", header, data)
    async with (
        streamer_of(tmp_path / "model", address, shared_memory),
        feed_from(address, tmp_path / "model") as feed,
    ):
        units = await asyncio.to_thread(sweep, feed, plan_of(tmp_path / "model"))
    assert units == [[data[1:]]]


async def test_units_that_stay_in_memory_are_never_read(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    partly = plan.keeping(plan.units[0].num_bytes)
    assert partly.resident_units == {0}
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model, plan=partly) as feed,
    ):
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, partly) == UNITS[1:]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
async def test_a_slot_is_never_filled_before_its_release(
    tmp_path: Path, address: str, shared_memory: Path, num_slots: int
) -> None:
    tensors = layer_tensors([[8_192]] * 4)  # over three blocks each: they begin within one
    model = write_single(tmp_path / "model", tensors)
    reads = WatchedReads()
    async with (
        streamer_of(model, address, shared_memory, chunk_bytes=4096, read_into=reads),
        feed_from(address, model, num_slots=num_slots) as feed,
    ):
        num_probes, reads_per_unit = 1, 3
        num_leases = 0

        def wait_until_the_streamer_is_as_far_ahead_as_it_gets() -> None:
            nonlocal num_leases
            reads.wait_for(num_probes + (num_leases + num_slots) * reads_per_unit)
            num_leases += 1

        for _ in range(3):
            units = await asyncio.to_thread(
                sweep,
                feed,
                plan_of(model),
                before_release=wait_until_the_streamer_is_as_far_ahead_as_it_gets,
            )
            assert units == units_of(tensors)
        await asyncio.to_thread(reads.wait_for, num_probes + (12 + num_slots) * reads_per_unit)
        assert reads.num_done == num_probes + (12 + num_slots) * reads_per_unit


@pytest.mark.parametrize("max_bytes", [4096, 5000])
async def test_short_reads_go_on(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path, max_bytes: int
) -> None:
    reads = WatchedReads()
    reads.max_bytes = max_bytes
    async with (
        streamer_of(model, address, shared_memory, read_into=reads),
        feed_from(address, model) as feed,
    ):
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_a_read_error_fails_the_sweep_and_the_next_one_is_whole(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    reads = WatchedReads()
    reads.fail_at(9, errno.EIO)
    async with (
        streamer_of(model, address, shared_memory, read_into=reads),
        feed_from(address, model, num_slots=1) as feed,
    ):
        with pytest.raises(PeerUnavailable, match=r"^model\.safetensors cannot be read: Input/out"):
            await asyncio.to_thread(sweep, feed, plan)
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_a_file_truncated_while_served_fails_the_sweep(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        os.truncate(model / "model.safetensors", 60_001)  # within a block: the read comes short
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors (is shorter|was ch)"):
                await asyncio.to_thread(sweep, feed, plan)


async def test_a_file_changed_in_place_is_never_served(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address, model, num_slots=1) as feed,
    ):
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(CheckpointCorrupt, match="was changed while it was served"):
            await asyncio.to_thread(sweep, feed, plan)


async def test_a_file_put_in_the_place_of_another_is_never_mixed_with_it(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    others = {name: random_bytes(len(data), seed=99) for name, data in TENSORS.items()}
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        write_single(model.parent / "other", others)
        (model.parent / "other/model.safetensors").rename(model / "model.safetensors")
        for _ in range(3):  # who has opened the old file keeps it
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        with pytest.raises(CheckpointCorrupt, match="have opened different checkpoints"):
            await WeightFeed.open(address, Checkpoint.open(model), plan, num_slots=1)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        assert await asyncio.to_thread(sweep, feed, plan) == units_of(others)


async def test_a_file_that_is_gone_is_served_to_those_who_have_opened_it(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        (model / "model.safetensors").unlink()
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_a_file_system_without_direct_reads_is_named_once_and_served(
    model: Path,
    plan: SweepPlan,
    address: str,
    shared_memory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        streamer_of(model, address, shared_memory, read_into=only_buffered),
        feed_from(address, model) as feed,
    ):
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "refuses direct reads (Invalid argument)" in warning.getMessage()


async def test_a_model_of_a_hundred_thousand_units_gets_its_ring(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    num_units, unit_bytes = 100_000, 32 * 64
    entry = {"dtype": "BF16", "shape": [num_units * 16, 64]}
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    header = {name: {**entry, "data_offsets": [0, num_units * unit_bytes]}}
    write_config(tmp_path)
    write_file(tmp_path / "model.safetensors", header, b"")
    os.truncate(tmp_path / "model.safetensors", num_units * unit_bytes + 4096)  # a hole
    piece = whole(Checkpoint.open(tmp_path).tensors[name])
    plan = SweepPlan.pack([WeightUse(pieces=(piece,), is_divisible=True)], unit_bytes=unit_bytes)
    assert len(plan.units) == num_units  # 7 MB to ask for; gRPC would refuse 4 MiB
    async with (
        streamer_of(tmp_path, address, shared_memory),
        feed_from(address, tmp_path, plan=plan) as feed,
    ):
        assert await asyncio.to_thread(sweep, feed, plan, num_units=5) == [[bytes(unit_bytes)]] * 5


async def test_too_little_shared_memory_says_what_to_do(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    model = tmp_path / "model"
    write_config(model)
    entry = {"dtype": "BF16", "shape": [1 << 42], "data_offsets": [0, 1 << 43]}
    write_file(model / "model.safetensors", {"model.layers.0.w": entry}, b"")
    os.truncate(model / "model.safetensors", (1 << 43) + 4096)  # 8 TiB, but a hole
    async with streamer_of(model, address, shared_memory):
        with pytest.raises(PeerUnavailable, match="enlarge it, or set HEADRACE_SLOTS to fewer"):
            await WeightFeed.open(address, Checkpoint.open(model), plan_of(model), num_slots=1)
    assert is_empty(shared_memory)


async def test_memory_that_is_full_refuses_one_target_and_serves_it_when_there_is_room(
    model: Path, plan: SweepPlan, address: str, tmp_path: Path
) -> None:
    with small_memory_dir(tmp_path / "memory", 256 << 10) as memory:  # three slots of 56 KiB
        async with streamer_of(model, address, memory):
            async with feed_from(address, model, num_slots=3) as feed:
                with pytest.raises(PeerUnavailable, match="No space left on device"):
                    await WeightFeed.open(address, Checkpoint.open(model), plan, num_slots=2)
                assert len(rings_in(memory)) == 1  # nothing is left of the other
                assert await asyncio.to_thread(sweep, feed, plan) == UNITS
            await assert_eventually(lambda: num_mappings(memory) == 0)
            async with feed_from(address, model, num_slots=2) as feed:
                assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def test_memory_for_one_ring_is_enough_after_a_sweep_that_was_cut_off(
    model: Path, plan: SweepPlan, address: str, tmp_path: Path
) -> None:
    with small_memory_dir(tmp_path / "memory", 256 << 10) as memory:
        async with streamer_of(model, address, memory), feed_from(address, model) as feed:
            await asyncio.to_thread(sweep, feed, plan, num_units=2)
            assert await _sweep_once_there_is_room(feed, plan) == UNITS


async def test_memory_for_one_ring_is_enough_after_a_read_error(
    model: Path, plan: SweepPlan, address: str, tmp_path: Path
) -> None:
    reads = WatchedReads()
    reads.fail_at(9, errno.EIO)
    with small_memory_dir(tmp_path / "memory", 256 << 10) as memory:
        async with (
            streamer_of(model, address, memory, read_into=reads),
            feed_from(address, model) as feed,
        ):
            assert await _sweep_once_there_is_room(feed, plan) == UNITS
            assert reads.num_failed == 1
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS


async def _sweep_once_there_is_room(feed: WeightFeed, plan: SweepPlan) -> list[Unit]:
    """Tries again: reads that run when a ring is given up keep its memory until they end."""
    while True:
        try:
            return await asyncio.to_thread(sweep, feed, plan)
        except PeerUnavailable:
            await asyncio.to_thread(lambda: None)


async def test_bytes_that_the_checkpoint_does_not_have_are_refused(
    model: Path, address: str, shared_memory: Path
) -> None:
    checkpoint = Checkpoint.open(model)
    span = checkpoint.tensors["model.layers.2.part0.weight"]
    beyond = Piece(span=span, begin_row=0, end_row=2)  # it has one row
    plan = SweepPlan.pack([WeightUse(pieces=(beyond,), is_divisible=False)], unit_bytes=1)
    async with streamer_of(model, address, shared_memory):
        with pytest.raises(InvalidRequest, match=r"no such bytes of tensor model\.layers\.2\."):
            await WeightFeed.open(address, checkpoint, plan, num_slots=1)
    assert is_empty(shared_memory)


async def test_nothing_is_left_of_a_session(model: Path, address: str, shared_memory: Path) -> None:
    async with streamer_of(model, address, shared_memory):
        async with feed_from(address, model) as feed:
            await asyncio.to_thread(feed.begin_sweep, 0, [])
            tensor = await asyncio.to_thread(feed.acquire, 0)
            assert len(rings_in(shared_memory)) == 1
            assert num_mappings(shared_memory) == 2  # the streamer's and the target's
        await assert_eventually(lambda: is_empty(shared_memory))
        await assert_eventually(lambda: num_mappings(shared_memory) == 1)  # tensors keep one
        assert bytes_of(tensor) == UNITS[0][0]
        del tensor
        await assert_eventually(lambda: num_mappings(shared_memory) == 0)


async def test_a_sweep_that_was_cut_off_is_followed_by_one_from_the_first_unit(
    model: Path, plan: SweepPlan, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        await asyncio.to_thread(sweep, feed, plan, num_units=2)  # released, but not all units
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        await asyncio.to_thread(feed.begin_sweep, 0, [])
        await asyncio.to_thread(feed.acquire, 0)  # never released
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        await feed.reopen()
        assert await asyncio.to_thread(sweep, feed, plan) == UNITS
        await assert_eventually(lambda: num_mappings(shared_memory) == 2)  # one ring, twice


async def test_closing_the_feed_ends_a_wait_for_a_unit(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory):
        async with feed_from(address, model) as feed:
            waiting = asyncio.ensure_future(asyncio.to_thread(feed.acquire, 0))  # before any sweep
        with pytest.raises(PeerUnavailable):
            await waiting
