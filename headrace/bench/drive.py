"""How fast the drive gives a model's files: direct reads as the streamer makes them."""

import errno
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from headrace.bench.page_cache import evict
from headrace.errors import PeerUnavailable

_CHUNK_BYTES = 4 << 20
_NUM_READERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRate:
    """What was measured."""

    gb_per_s: float
    is_direct: bool
    """Whether the file system reads past the page cache; else the figure may flatter the drive."""


def measure_drive(files: Sequence[Path], *, duration_s: float) -> DriveRate:
    """Read files from their beginning, over and over if they are short.

    Args:
        files: At least one that is not empty.
        duration_s: About how long.

    Raises:
        PeerUnavailable: A file cannot be read.
    """
    evict(files)
    is_direct = all(map(_allows_direct, files))
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    descriptors = [os.open(file, flags) for file in files]
    try:
        rate = _read_on_threads(descriptors, duration_s)
    except OSError as error:
        raise PeerUnavailable(
            f"the model cannot be read: {os.strerror(error.errno or 0)}"
        ) from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return DriveRate(gb_per_s=rate, is_direct=is_direct)


def _read_on_threads(descriptors: Sequence[int], duration_s: float) -> float:
    """GB/s of all threads together."""
    chunks = [
        (descriptor, offset)
        for descriptor in descriptors
        for offset in range(0, os.fstat(descriptor).st_size, _CHUNK_BYTES)
    ]
    places = cycle(chunks)  # next() on it is atomic
    began_s = time.perf_counter()

    def read() -> int:
        num_bytes = 0
        with mmap.mmap(-1, _CHUNK_BYTES) as buffer:
            while time.perf_counter() - began_s < duration_s:
                descriptor, offset = next(places)
                num_bytes += os.preadv(descriptor, [buffer], offset)
        return num_bytes

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        readers = [pool.submit(read) for _ in range(_NUM_READERS)]
        num_bytes = sum(reader.result() for reader in readers)
    return num_bytes / (time.perf_counter() - began_s) / 1e9


def _allows_direct(file: Path) -> bool:
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True
