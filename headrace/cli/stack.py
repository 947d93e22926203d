"""Runs all processes of one machine: starts them in order, watches them, stops every one of them.

A process that ends by itself ends the stack; nothing is restarted silently.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from headrace.cli.child import Child
from headrace.cli.readiness import Readiness
from headrace.cli.status import Display, ProcessStatus, RateMeter, StackStatus
from headrace.cli.wiring import (
    STREAMER,
    PrivateDirectories,
    ProcessSpec,
    StackConfig,
    stages,
)
from headrace.errors import ConfigError, HeadraceError, PeerUnavailable
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import invoke, open_channel

T = TypeVar("T")

_POLL_INTERVAL_S = 0.2
_OBSERVE_INTERVAL_S = 1.0
_CALL_TIMEOUT_S = 2.0
_FAILURE_GRACE_S = 4.0
"""For the rest of a stack that lost a process: there is nothing left to drain for."""
_REAP_S = 1.0
"""How much later than its broken connections the end of a process may show."""
_MAX_SOCKET_PATH = 100
_SHARED_MEMORY = Path("/dev/shm")


async def run_stack(
    config: StackConfig,
    environ: Mapping[str, str],
    display: Display,
    body: Callable[[], Awaitable[T]],
) -> T:
    """Start every process, run body once all serve, stop every process.

    Args:
        config: What to start.
        environ: The user's environment.
        display: Shows what happens.
        body: What to do meanwhile; cancelled when a process ends.

    Returns:
        What body returned.

    Raises:
        HeadraceError: What body raised, or which process ended and its last log lines.
    """
    try:
        with private_directories() as directories:
            endpoints = (
                f"HTTP {config.base_url}/v1, gRPC {config.host}:{config.grpc_port}, "
                f"logs in {directories.run}"
            )
            stack = Stack(directories, display, endpoints)
            return await stack.run(stages(config, directories, environ), body)
    finally:
        display.close()


class Stack:
    """The processes of one `run_stack`."""

    def __init__(self, directories: PrivateDirectories, display: Display, endpoints: str) -> None:
        self._directories = directories
        self._display = display
        self._status = StackStatus(endpoints=endpoints)
        self._children: list[list[Child]] = []
        """By stage, in start order."""

    async def run(self, plan: list[list[ProcessSpec]], body: Callable[[], Awaitable[T]]) -> T:
        """See run_stack."""
        grace_s: float | None = None
        try:
            async with asyncio.TaskGroup() as group:
                observer = group.create_task(self._observe())
                watchers = [
                    watcher for stage in plan for watcher in await self._start(stage, group)
                ]
                self._status.is_serving = True
                self._display.show(self._status)
                result = await body()
                for task in (observer, *watchers):
                    task.cancel()
            return result
        except BaseExceptionGroup as errors:
            grace_s = _FAILURE_GRACE_S
            raise await self._cause(errors) from None
        finally:
            await self._stop(grace_s)

    async def _start(
        self, stage: list[ProcessSpec], group: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Start one stage's processes and return when all of them serve."""
        children: list[Child] = []
        self._children.append(children)
        watchers = []
        for spec in stage:
            child = await Child.start(spec, self._directories.run)
            children.append(child)
            self._status.processes[spec.name] = ProcessStatus(started_at_s=child.started_at_s)
            watchers.append(group.create_task(_fail_at_end(child)))
        await asyncio.gather(*(self._until_ready(child) for child in children))
        return watchers

    async def _until_ready(self, child: Child) -> None:
        """Poll for as long as it lives: how long a model loads is the disk's business."""
        status = self._status.processes[child.spec.name]
        while status.readiness is not Readiness.READY:
            readiness = await child.spec.probe.check()
            if readiness is Readiness.READY:
                status.ready_after_s = time.monotonic() - child.started_at_s
            if readiness is not status.readiness:
                status.readiness = readiness
                self._display.show(self._status)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _observe(self) -> None:
        """Keep memory and the stream rate up to date."""
        meter = RateMeter()
        async with open_channel(f"unix:{self._directories.socket(STREAMER)}") as channel:
            streamer = streamer_pb2_grpc.StreamerStub(channel)
            while True:
                self._measure_memory()
                process = self._status.processes.get(STREAMER)
                if process is not None and process.readiness is Readiness.READY:
                    await self._measure_rate(streamer, meter)
                self._display.show(self._status)
                await asyncio.sleep(_OBSERVE_INTERVAL_S)

    def _measure_memory(self) -> None:
        for child in self._all_children():
            try:
                memory = psutil.Process(child.pid).memory_info()
            except psutil.Error:  # it just ended; its watcher tells
                continue
            self._status.processes[child.spec.name].memory_bytes = memory.rss

    async def _measure_rate(
        self, streamer: streamer_pb2_grpc.StreamerStub, meter: RateMeter
    ) -> None:
        request = streamer_pb2.GetStreamerRequest()
        try:
            info = await invoke(
                streamer.GetStreamer, request, peer=STREAMER, timeout_s=_CALL_TIMEOUT_S
            )
        except HeadraceError:  # a rate is not worth ending the stack for
            return
        self._status.gb_per_s = meter.add(time.monotonic(), info.bytes_read_total)

    async def _cause(self, errors: BaseExceptionGroup) -> BaseException:
        """What to tell the user: a lost process explains the failed calls to it."""
        first = errors.exceptions[0]
        if isinstance(first, PeerUnavailable):
            waits = [asyncio.ensure_future(child.wait()) for child in self._all_children()]
            await asyncio.wait(waits, timeout=_REAP_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        ended = [child for child in self._all_children() if not child.is_running]
        return _failure(ended[0]) if ended else first

    async def _stop(self, grace_s: float | None) -> None:
        """Stop later stages first, so that a draining gateway still has its peers."""
        self._status.is_stopping = self._status.is_serving and grace_s is None
        self._display.show(self._status)
        try:
            for children in reversed(self._children):
                await asyncio.gather(
                    *(
                        child.stop(
                            grace_s or child.spec.stop_grace_s, is_hurried=grace_s is not None
                        )
                        for child in children
                    )
                )
        finally:  # also when a second signal cancelled the wait above
            for child in self._all_children():
                child.kill()

    def _all_children(self) -> list[Child]:
        return [child for stage in self._children for child in stage]


async def _fail_at_end(child: Child) -> None:
    await child.wait()
    raise _failure(child)


def _failure(child: Child) -> HeadraceError:
    return PeerUnavailable(child.last_words())


@contextmanager
def private_directories() -> Iterator[PrivateDirectories]:
    """Directories for one stack, gone with all that is in them at the end.

    Raises:
        ConfigError: They cannot be made.
    """
    shared_memory_root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    run = _make_run_dir()
    shared_memory = Path(tempfile.mkdtemp(prefix="headrace-", dir=shared_memory_root))
    try:
        yield PrivateDirectories(run=run, shared_memory=shared_memory)
    finally:
        for directory in (run, shared_memory):
            shutil.rmtree(directory, ignore_errors=True)


def _make_run_dir() -> Path:
    """A directory, mode 0700, whose sockets' paths fit the kernel's limit."""
    try:
        run = Path(tempfile.mkdtemp(prefix="headrace-"))
        if len(str(run / "streamer.sock")) >= _MAX_SOCKET_PATH:
            run.rmdir()
            run = Path(tempfile.mkdtemp(prefix="headrace-", dir="/tmp"))
    except OSError as error:
        raise ConfigError(
            f"cannot make a temporary directory ({error.strerror}): set TMPDIR"
        ) from None
    return run
