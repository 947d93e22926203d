"""A real streamer, in this process or in one of its own, and sweeps over what it streams."""

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import groupby
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.model.checkpoint import Checkpoint, TensorSpan
from headrace.model.device import CPU
from headrace.model.sweep_plan import Piece, SweepPlan, WeightUse
from headrace.rpc import streamer_pb2_grpc
from headrace.rpc.server import MAX_MODEL_MESSAGE_BYTES, RpcServer
from services.streamer.reader import Reader, ReadInto
from services.streamer.registry import StreamRegistry
from services.streamer.servicer import StreamerServicer
from services.target.weight_feed import WeightFeed

Unit = list[bytes]
"""The bytes of each piece."""


@contextmanager
def shared_memory_dir() -> Iterator[Path]:
    """A directory of its own on the memory file system, so that leftovers show."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@contextmanager
def small_memory_dir(directory: Path, num_bytes: int) -> Iterator[Path]:
    """A memory file system of its own and of that size; skips the test where none may be made."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a memory file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@asynccontextmanager
async def streamer_of(
    directory: Path,
    address: str,
    shared_memory: Path,
    *,
    num_readers: int = 2,
    chunk_bytes: int = 8192,
    read_into: ReadInto | None = None,
) -> AsyncIterator[StreamRegistry]:
    """A streamer in this process."""
    checkpoint = Checkpoint.open(directory)
    files = checkpoint.files
    registry = StreamRegistry(
        checkpoint,
        Reader(files) if read_into is None else Reader(files, read_into),
        shared_memory_dir=shared_memory,
        num_readers=num_readers,
        chunk_bytes=chunk_bytes,
    )
    server = RpcServer(
        address=address,
        service_names=["headrace.v1.Streamer"],
        max_message_bytes=MAX_MODEL_MESSAGE_BYTES,
    )
    streamer_pb2_grpc.add_StreamerServicer_to_server(StreamerServicer(registry), server.server)
    await server.start()
    try:
        yield registry
    finally:
        await server.stop(0)


async def start_streamer_process(
    directory: Path, address: str, shared_memory: Path
) -> asyncio.subprocess.Process:
    """`python -m services.streamer`, as it runs in production; end it with `end`."""
    settings = {
        "HEADRACE_TARGET_DIR": str(directory),
        "HEADRACE_STREAMER_ADDRESS": address,
        "HEADRACE_SHM_DIR": str(shared_memory),
        "HEADRACE_STREAMER_CHUNK_BYTES": "8192",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.streamer",
        env={**os.environ, **settings},
        stderr=asyncio.subprocess.PIPE,
    )


async def end(process: asyncio.subprocess.Process) -> str:
    """What a process wrote to its log, once it is gone."""
    if process.returncode is None:
        process.kill()
    _, log = await process.communicate()
    return log.decode()


def plan_of(directory: Path) -> SweepPlan:
    """One unit for each decoder layer, its tensors by name."""
    tensors = Checkpoint.open(directory).tensors
    names = sorted(filter(_layer_of, tensors), key=_layer_of)
    uses = [
        WeightUse(pieces=tuple(map(whole, map(tensors.__getitem__, layer))), is_divisible=False)
        for _, layer in groupby(names, lambda name: _layer_of(name)[:1])
    ]
    return SweepPlan.pack(uses, unit_bytes=1)


def whole(span: TensorSpan) -> Piece:
    """All rows of a tensor."""
    return Piece(span=span, begin_row=0, end_row=prod(span.shape[:-1]))


def units_of(tensors: Mapping[str, bytes]) -> list[Unit]:
    """[U] what a sweep over the units of `plan_of` must bring."""
    names = sorted(filter(_layer_of, tensors), key=_layer_of)
    layers = groupby(names, lambda name: _layer_of(name)[:1])
    return [[tensors[name] for name in layer] for _, layer in layers]


def _layer_of(name: str) -> tuple[int, str] | tuple[()]:
    """Number of a tensor's layer, and its name; empty for one outside of the layers."""
    return (int(name.split(".")[2]), name) if ".layers." in name else ()


@asynccontextmanager
async def feed_from(
    address: str,
    directory: Path,
    *,
    plan: SweepPlan | None = None,
    num_slots: int = 3,
    device: torch.device = CPU,
) -> AsyncIterator[WeightFeed]:
    """A target's end of the stream; without a plan one unit for each layer."""
    feed = await WeightFeed.open(
        address,
        Checkpoint.open(directory),
        plan or plan_of(directory),
        num_slots=num_slots,
        device=device,
    )
    try:
        yield feed
    finally:
        await feed.close()


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of a borrowed piece."""
    return tensor.view(torch.uint8).numpy().tobytes()


def sweep(
    feed: WeightFeed,
    plan: SweepPlan,
    *,
    num_units: int | None = None,
    before_release: Callable[[], object] = lambda: None,
) -> list[Unit]:
    """[U] each unit as it was when it was given back. On the compute thread."""
    units = []
    feed.begin_sweep(0, [])
    for unit in plan.streamed_units[:num_units]:
        indices = range(unit.first_piece, unit.end_piece)
        tensors = [feed.acquire(index) for index in indices]
        before_release()
        units.append([bytes_of(tensor) for tensor in tensors])
        release_all(feed, indices)
    if num_units is None:
        feed.end_sweep(0)
    return units


def release_all(feed: WeightFeed, indices: Iterable[int]) -> None:
    """Give pieces back."""
    for index in indices:
        feed.release(index)


def is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


def rings_in(directory: Path) -> list[Path]:
    """Files of the rings that have a name."""
    return [path for path in directory.iterdir() if path.is_file()]


def num_mappings(shared_memory: Path, pid: int | str = "self") -> int:
    """Rings that a process has mapped, their files unlinked or not."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return sum(str(shared_memory) in line for line in maps.splitlines())


class WatchedReads:
    """Reads as the system does, counts them, and fails or shortens them on demand."""

    def __init__(self) -> None:
        self.num_done = 0
        self.num_failed = 0
        self.max_bytes = 1 << 30
        """Reads claim no more than this at a time."""
        self._errors: dict[int, int] = {}
        self._progress = threading.Condition()

    def fail_at(self, index: int, errno: int) -> None:
        """Let the read of that number fail, once."""
        self._errors[index] = errno

    def wait_for(self, num_done: int) -> None:
        """Return when so many reads were made."""
        with self._progress:
            assert self._progress.wait_for(lambda: self.num_done >= num_done, timeout=10)

    def __call__(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        with self._progress:
            index, self.num_done = self.num_done, self.num_done + 1
            self._progress.notify_all()
        if index in self._errors:
            self.num_failed += 1
            errno = self._errors.pop(index)
            raise OSError(errno, os.strerror(errno))
        return min(self.max_bytes, os.preadv(descriptor, [buffer], offset))


def only_buffered(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Reads as a file system does that opens files for direct reads but then refuses them."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(22, os.strerror(22))
    return os.preadv(descriptor, [buffer], offset)
