"""From the file to the target's tensors: a real streamer, a real feed, a unix socket between."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import CheckpointCorrupt, PeerUnavailable
from services.target.layer_feed import LayerFeed
from tests.support.checkpoints import (
    layer_tensors,
    write_config,
    write_file,
    write_sharded,
    write_single,
)
from tests.support.eventually import assert_eventually
from tests.support.streamer_rig import (
    WatchedReads,
    bytes_of,
    end,
    feed_from,
    is_empty,
    layers_of,
    num_mappings,
    only_buffered,
    shared_memory_dir,
    start_streamer_process,
    streamer_of,
    sweep,
)

TENSORS = layer_tensors([[20_000, 30], [9_000, 40_000, 2], [4_096], [50_002], [1_234, 777 * 2]])
LAYERS = layers_of(TENSORS)
L = len(LAYERS)


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with shared_memory_dir() as directory:
        yield directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_single(tmp_path / "model", TENSORS)
    os.utime(directory / "model.safetensors", ns=(0, 0))  # so that any write changes it
    return directory


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/streamer.sock"


@pytest.mark.parametrize("num_slots", [1, 2, 3, 99])
async def test_every_sweep_brings_the_bytes_of_the_file(
    model: Path, address: str, shared_memory: Path, num_slots: int
) -> None:
    async with (
        streamer_of(model, address, shared_memory, num_slots=num_slots),
        feed_from(address) as feed,
    ):
        for _ in range(4):
            assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        assert feed.bytes_streamed == 4 * feed.bytes_per_sweep


async def test_a_layer_over_several_shards_arrives_whole(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    names = list(TENSORS)
    shards = {f"{i}.safetensors": {n: TENSORS[n] for n in names[i::3]} for i in (2, 0, 1)}
    model = write_sharded(tmp_path / "model", shards)
    async with streamer_of(model, address, shared_memory), feed_from(address) as feed:
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS


@pytest.mark.parametrize("num_slots", [1, 2, 3])
async def test_a_slot_is_never_filled_before_its_release(
    tmp_path: Path, address: str, shared_memory: Path, num_slots: int
) -> None:
    tensors = layer_tensors([[8_192]] * 4)  # over three blocks each: they begin within one
    model = write_single(tmp_path / "model", tensors)
    reads = WatchedReads()
    async with (
        streamer_of(
            model, address, shared_memory, num_slots=num_slots, chunk_bytes=4096, read_into=reads
        ),
        feed_from(address) as feed,
    ):
        num_probes, reads_per_layer = 1, 3
        num_leases = 0

        def wait_until_the_streamer_is_as_far_ahead_as_it_gets() -> None:
            nonlocal num_leases
            reads.wait_for(num_probes + (num_leases + num_slots) * reads_per_layer)
            num_leases += 1

        for _ in range(3):
            layers = await asyncio.to_thread(
                sweep,
                feed,
                4,
                before_release=wait_until_the_streamer_is_as_far_ahead_as_it_gets,
            )
            assert layers == layers_of(tensors)
        await asyncio.to_thread(reads.wait_for, num_probes + (12 + num_slots) * reads_per_layer)
        assert reads.num_done == num_probes + (12 + num_slots) * reads_per_layer


@pytest.mark.parametrize("max_bytes", [4096, 5000])
async def test_short_reads_go_on(
    model: Path, address: str, shared_memory: Path, max_bytes: int
) -> None:
    reads = WatchedReads()
    reads.max_bytes = max_bytes
    async with (
        streamer_of(model, address, shared_memory, read_into=reads),
        feed_from(address) as feed,
    ):
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS


async def test_a_read_error_fails_the_sweep_and_the_next_one_is_whole(
    model: Path, address: str, shared_memory: Path
) -> None:
    reads = WatchedReads()
    reads.fail_at(9, errno.EIO)
    async with (
        streamer_of(model, address, shared_memory, read_into=reads),
        feed_from(address) as feed,
    ):
        with pytest.raises(PeerUnavailable, match=r"^model\.safetensors cannot be read: Input/out"):
            await asyncio.to_thread(sweep, feed, L)
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, L) == LAYERS


async def test_a_file_truncated_while_served_fails_the_sweep(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address) as feed:
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        os.truncate(model / "model.safetensors", 60_001)  # within a block: the read comes short
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors (is shorter|was ch)"):
                await asyncio.to_thread(sweep, feed, L)


async def test_a_file_changed_in_place_is_never_served(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory, num_slots=1), feed_from(address) as feed:
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(CheckpointCorrupt, match="was changed while it was served"):
            await asyncio.to_thread(sweep, feed, L)


async def test_a_file_system_without_direct_reads_is_named_once_and_served(
    model: Path, address: str, shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        streamer_of(model, address, shared_memory, read_into=only_buffered),
        feed_from(address) as feed,
    ):
        for _ in range(2):
            assert await asyncio.to_thread(sweep, feed, L) == LAYERS
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "refuses direct reads (Invalid argument)" in warning.getMessage()


async def test_too_little_shared_memory_says_what_to_do(
    tmp_path: Path, address: str, shared_memory: Path
) -> None:
    write_config(tmp_path / "model")
    entry = {"dtype": "BF16", "shape": [1 << 42], "data_offsets": [0, 1 << 43]}
    write_file(tmp_path / "model/model.safetensors", {"model.layers.0.w": entry}, b"")
    os.truncate(tmp_path / "model/model.safetensors", (1 << 43) + 4096)  # 8 TiB, but a hole
    async with streamer_of(tmp_path / "model", address, shared_memory):
        with pytest.raises(PeerUnavailable, match="enlarge it, or set HEADRACE_STREAMER_SLOTS"):
            await LayerFeed.open(address)
    assert is_empty(shared_memory)


async def test_nothing_is_left_of_a_session(model: Path, address: str, shared_memory: Path) -> None:
    async with streamer_of(model, address, shared_memory):
        async with feed_from(address) as feed:
            await asyncio.to_thread(feed.begin_sweep, 0, [])
            tensors = await asyncio.to_thread(feed.acquire, 0)
            assert is_empty(shared_memory)  # the name goes as soon as it is mapped
            assert num_mappings(shared_memory) == 2  # the streamer's and the target's
        await assert_eventually(lambda: num_mappings(shared_memory) == 1)  # tensors keep one
        assert not any(bytes_of(tensors)[name].strip(b"\0") for name in tensors)  # but no memory
        del tensors
        await assert_eventually(lambda: num_mappings(shared_memory) == 0)


async def test_a_sweep_that_was_cut_off_is_followed_by_one_from_the_first_layer(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory), feed_from(address) as feed:
        await asyncio.to_thread(sweep, feed, 2)  # released, but not all layers
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        await asyncio.to_thread(feed.begin_sweep, 0, [])
        await asyncio.to_thread(feed.acquire, 0)  # never released
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        await feed.reopen()
        assert await asyncio.to_thread(sweep, feed, L) == LAYERS
        await assert_eventually(lambda: num_mappings(shared_memory) == 2)  # one ring, twice


async def test_two_targets_are_served_at_once(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with (
        streamer_of(model, address, shared_memory),
        feed_from(address) as one,
        feed_from(address) as two,
    ):
        for _ in range(3):
            first, second = await asyncio.gather(
                asyncio.to_thread(sweep, one, L), asyncio.to_thread(sweep, two, L)
            )
            assert first == second == LAYERS


async def test_closing_the_feed_ends_a_wait_for_a_layer(
    model: Path, address: str, shared_memory: Path
) -> None:
    async with streamer_of(model, address, shared_memory, num_slots=1):
        async with feed_from(address) as feed:
            await asyncio.to_thread(feed.begin_sweep, 0, [])
            await asyncio.to_thread(feed.acquire, 0)
            waiting = asyncio.ensure_future(asyncio.to_thread(feed.acquire, 1))
        with pytest.raises(PeerUnavailable):
            await waiting


async def test_a_killed_target_frees_its_ring(
    model: Path, address: str, shared_memory: Path
) -> None:
    program = (
        "import asyncio, sys\n"
        "from services.target.layer_feed import LayerFeed\n"
        "async def main():\n"
        "    feed = await LayerFeed.open(sys.argv[1])\n"
        "    await asyncio.to_thread(feed.acquire, 0)\n"
        "    print('holding', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with streamer_of(model, address, shared_memory):
        target = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, address, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert target.stdout is not None
            assert await target.stdout.readline() == b"holding\n"
            assert num_mappings(shared_memory) == 1
        finally:
            target.kill()
            await target.communicate()
        assert target.returncode == -signal.SIGKILL
        await assert_eventually(lambda: num_mappings(shared_memory) == 0)
        assert is_empty(shared_memory)


async def test_a_killed_streamer_fails_the_sweep_and_another_one_serves_the_next(
    model: Path, address: str, shared_memory: Path
) -> None:
    streamer = await start_streamer_process(model, address, shared_memory)
    try:
        async with feed_from(address) as feed:
            assert await asyncio.to_thread(sweep, feed, L) == LAYERS

            with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                await asyncio.to_thread(sweep, feed, L, before_release=lambda: _kill(streamer.pid))
            await end(streamer)
            assert streamer.returncode == -signal.SIGKILL
            with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                await asyncio.to_thread(sweep, feed, L)
            streamer = await start_streamer_process(model, address, shared_memory)
            assert await _sweep_once_it_answers(feed) == LAYERS
            assert num_mappings(shared_memory, streamer.pid) == 1
    finally:
        await end(streamer)
    assert is_empty(shared_memory)


@pytest.mark.slow  # the session lasts as long as the grace
async def test_a_streamer_told_to_stop_ends_its_sessions_quietly(
    model: Path, address: str, shared_memory: Path
) -> None:
    streamer = await start_streamer_process(model, address, shared_memory)
    try:
        async with feed_from(address) as feed:
            assert await asyncio.to_thread(sweep, feed, L) == LAYERS
            streamer.terminate()
            assert await streamer.wait() == 0
            with pytest.raises(PeerUnavailable):
                await asyncio.to_thread(sweep, feed, L)
    finally:
        log = await end(streamer)
    assert "stopping on a signal" in log
    assert "Traceback" not in log
    assert is_empty(shared_memory)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the second time
        os.kill(pid, signal.SIGKILL)


async def _sweep_once_it_answers(feed: LayerFeed) -> list[dict[str, bytes]]:
    while True:
        try:
            return await asyncio.to_thread(sweep, feed, L)
        except PeerUnavailable:
            await asyncio.to_thread(lambda: None)
