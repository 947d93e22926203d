"""A stack starts in order, tells what failed, and leaves nothing running."""

import asyncio
import io
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from headrace.cli.child import Child
from headrace.cli.readiness import Readiness
from headrace.cli.stack import Stack
from headrace.cli.status import PlainDisplay
from headrace.cli.wiring import PrivateDirectories, ProcessSpec
from headrace.errors import InvalidRequest, PeerUnavailable
from tests.support.eventually import assert_eventually

SERVE = """
import os, pathlib, signal, sys
for line in sys.argv[2:]: print(line)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""
FAIL = """
import sys
for line in sys.argv[1:]: print(line)
sys.exit(3)
"""
IGNORE_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVE


@dataclass(frozen=True, slots=True)
class FileProbe:
    """Ready when the process has written its file."""

    path: Path

    async def check(self) -> Readiness:
        return Readiness.READY if self.path.exists() else Readiness.STARTING


class Harness:
    """Small scripts as the processes of a stack."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.output = io.StringIO()
        directories = PrivateDirectories(run=run_dir, shared_memory=run_dir)
        self.stack = Stack(directories, PlainDisplay(self.output), "somewhere")

    def serves(self, name: str, *lines: str, script: str = SERVE) -> ProcessSpec:
        return self._spec(name, script, str(self._pid_file(name)), *lines)

    def fails(self, name: str, *lines: str) -> ProcessSpec:
        return self._spec(name, FAIL, *lines)

    def pid(self, name: str) -> int:
        return int(self._pid_file(name).read_text())

    def is_gone(self, name: str) -> bool:
        return not psutil.pid_exists(self.pid(name))

    def _pid_file(self, name: str) -> Path:
        return self.run_dir / f"{name}.pid"

    def _spec(self, name: str, script: str, *arguments: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=(sys.executable, "-c", script, *arguments),
            environment=os.environ,
            probe=FileProbe(self._pid_file(name)),
            stop_grace_s=5.0,
        )


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_body_runs_when_all_serve_and_nothing_is_left(harness: Harness) -> None:
    plan = [[harness.serves("redis"), harness.serves("streamer")], [harness.serves("gateway")]]

    async def body() -> str:
        assert not any(harness.is_gone(name) for name in ("redis", "streamer", "gateway"))
        return "answer"

    assert await harness.stack.run(plan, body) == "answer"
    assert all(harness.is_gone(name) for name in ("redis", "streamer", "gateway"))


async def test_a_stage_starts_when_the_one_before_serves(harness: Harness) -> None:
    plan = [[harness.serves("streamer")], [harness.serves("target")], [harness.serves("gateway")]]

    async def body() -> None:
        pass

    await harness.stack.run(plan, body)
    lines = [line.split(" ")[0:2] for line in harness.output.getvalue().splitlines()]
    ready = [name for name, state in lines if state == "ready,"]
    assert ready == ["streamer:", "target:", "gateway:"]


async def test_a_process_that_dies_at_start_is_named_with_its_last_lines(harness: Harness) -> None:
    plan = [[harness.serves("redis")], [harness.fails("target", "loading", "damaged shard 2")]]
    with pytest.raises(PeerUnavailable) as caught:
        await harness.stack.run(plan, forever)
    assert "the target ended with exit code 3" in caught.value.message
    assert "  loading\n  damaged shard 2" in caught.value.message
    assert harness.is_gone("redis")


async def test_a_process_that_dies_later_ends_the_body_and_the_stack(harness: Harness) -> None:
    plan = [[harness.serves("redis"), harness.serves("target", "serving")]]
    was_cancelled = asyncio.Event()

    async def body() -> None:
        os.kill(harness.pid("target"), signal.SIGKILL)
        try:
            await forever()
        finally:
            was_cancelled.set()

    with pytest.raises(PeerUnavailable, match="the target ended by SIGKILL"):
        await harness.stack.run(plan, body)
    assert was_cancelled.is_set()
    assert harness.is_gone("redis")


async def test_a_dead_process_explains_the_call_that_failed_first(harness: Harness) -> None:
    async def body() -> None:
        os.kill(harness.pid("gateway"), signal.SIGKILL)
        raise PeerUnavailable("the gateway does not answer")

    with pytest.raises(PeerUnavailable, match="the gateway ended by SIGKILL"):
        await harness.stack.run([[harness.serves("gateway")]], body)


async def test_an_error_of_the_body_comes_out_as_it_is(harness: Harness) -> None:
    async def body() -> None:
        raise InvalidRequest("top_p must be in (0, 1]")

    with pytest.raises(InvalidRequest, match="top_p"):
        await harness.stack.run([[harness.serves("gateway")]], body)
    assert harness.is_gone("gateway")


async def test_cancellation_stops_every_process(harness: Harness) -> None:
    running = asyncio.Event()

    async def body() -> None:
        running.set()
        await forever()

    task = asyncio.create_task(harness.stack.run([[harness.serves("gateway")]], body))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert harness.is_gone("gateway")


async def test_a_process_that_ignores_sigterm_is_killed(harness: Harness) -> None:
    spec = harness.serves("gateway", script=IGNORE_SIGTERM)
    child = await Child.start(spec, harness.run_dir)
    await assert_eventually(lambda: (harness.run_dir / "gateway.pid").exists())
    await child.stop(grace_s=0.05)
    assert harness.is_gone("gateway")
    assert "SIGKILL" in child.last_words()


async def test_a_process_ends_with_its_launcher(harness: Harness) -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, subprocess, sys, time\n"
        "tether = [sys.executable, '-m', 'headrace.cli.tether', str(os.getpid())]\n"
        "subprocess.Popen([*tether, *sys.argv[1:]])\n"
        "time.sleep(60)",
        *harness.serves("redis").command,
    )
    await assert_eventually(lambda: (harness.run_dir / "redis.pid").exists())
    launcher.kill()
    await launcher.wait()
    await assert_eventually(lambda: harness.is_gone("redis"))
