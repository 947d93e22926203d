"""A real streamer, in this process or in one of its own, and sweeps over what it streams."""

import asyncio
import fcntl
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headrace.model.checkpoint import Checkpoint
from headrace.rpc import streamer_pb2_grpc
from headrace.rpc.server import RpcServer
from services.streamer.reader import Reader, ReadInto
from services.streamer.servicer import StreamerServicer
from services.target.layer_feed import LayerFeed

Layer = dict[str, bytes]


@contextmanager
def shared_memory_dir() -> Iterator[Path]:
    """A directory of its own on the memory file system, so that leftovers show."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@asynccontextmanager
async def streamer_of(
    directory: Path,
    address: str,
    shared_memory: Path,
    *,
    num_slots: int = 3,
    num_readers: int = 2,
    chunk_bytes: int = 8192,
    read_into: ReadInto | None = None,
) -> AsyncIterator[None]:
    """A streamer in this process."""
    checkpoint = Checkpoint.open(directory)
    files = sorted({span.file for span in checkpoint.tensors.values()})
    servicer = StreamerServicer(
        checkpoint,
        shared_memory_dir=shared_memory,
        num_slots=num_slots,
        num_readers=num_readers,
        chunk_bytes=chunk_bytes,
        reader=Reader(files) if read_into is None else Reader(files, read_into),
    )
    server = RpcServer(address=address, service_names=["headrace.v1.Streamer"])
    streamer_pb2_grpc.add_StreamerServicer_to_server(servicer, server.server)
    await server.start()
    try:
        yield
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


@asynccontextmanager
async def feed_from(address: str) -> AsyncIterator[LayerFeed]:
    """A target's end of the stream."""
    feed = await LayerFeed.open(address)
    try:
        yield feed
    finally:
        await feed.close()


def layers_of(tensors: Mapping[str, bytes]) -> list[Layer]:
    """[L] what a sweep must bring."""
    layers: dict[int, Layer] = {}
    for name, data in tensors.items():
        if ".layers." in name:
            layers.setdefault(int(name.split(".")[2]), {})[name] = data
    return [layers[index] for index in sorted(layers)]


def bytes_of(tensors: Mapping[str, Tensor]) -> Layer:
    """A copy of a lease's tensors."""
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def sweep(
    feed: LayerFeed, num_layers: int, *, before_release: Callable[[], None] = lambda: None
) -> list[Layer]:
    """[L] each layer as it was when it was given back. On the compute thread."""
    layers = []
    feed.begin_sweep(0, [])
    for index in range(num_layers):
        tensors = feed.acquire(index)
        before_release()
        layers.append(bytes_of(tensors))
        feed.release(index)
    feed.end_sweep(0)
    return layers


def is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


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
