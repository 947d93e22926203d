"""Reads pieces of checkpoint files past the page cache, where the file system allows it."""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CheckpointCorrupt, PeerUnavailable
from headrace.model.checkpoint import TensorSpan
from services.streamer.layout import ALIGNMENT_BYTES, Read

logger = logging.getLogger(__name__)

ReadInto = Callable[[int, memoryview, int], int]
"""(descriptor, buffer, offset) to bytes read, as os.preadv does."""


def _preadv(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


class Reader:
    """The open files of one checkpoint; reads may run on many threads at once."""

    def __init__(self, files: Iterable[Path], read_into: ReadInto = _preadv) -> None:
        """Open the files, for direct reads if all of them allow it.

        Args:
            files: Every file that reads will name.
            read_into: The system call.
        """
        self._read_into = read_into
        paths = list(files)
        reason = next(filter(None, map(self._why_not_direct, paths)), None)
        self.is_direct = reason is None
        if reason is not None:
            logger.warning(
                "reading through the page cache, which is slower and takes memory: the file "
                "system of %s refuses direct reads (%s)",
                paths[0].parent,
                reason,
            )
        self._granularity_bytes = ALIGNMENT_BYTES if self.is_direct else 1
        flags = os.O_RDONLY | (os.O_DIRECT if self.is_direct else 0)
        self._descriptors = {path: os.open(path, flags) for path in paths}
        self._stamps = {path: self._stamp(path) for path in paths}
        self.meter = ReadMeter()

    def require(self, spans: Iterable[TensorSpan]) -> None:
        """Check that the files, as opened, hold all bytes of some tensors.

        Raises:
            CheckpointCorrupt: A file was cut short since its header was read.
        """
        for span in spans:
            if span.offset_bytes + span.num_bytes > self._stamps[span.file].num_bytes:
                raise CheckpointCorrupt(f"{span.file.name} ends before tensor {span.name} does")

    def read(self, read: Read, slot: memoryview) -> None:
        """Bring a piece of a file to its place in a slot.

        Raises:
            CheckpointCorrupt: The file ends early or was changed since it was opened.
            PeerUnavailable: The device failed.
        """
        buffer = slot[read.slot_offset_bytes : read.slot_offset_bytes + read.num_bytes]
        self.meter.begin()
        try:
            self._fill(read, buffer)
        except OSError as error:
            raise PeerUnavailable(
                f"{read.file.name} cannot be read: {os.strerror(error.errno or 0)}"
            ) from None
        finally:
            self.meter.end(read.num_bytes)
        if self._stamp(read.file) != self._stamps[read.file]:
            raise CheckpointCorrupt(
                f"{read.file.name} was changed while it was served: restart the streamer"
            )

    def _fill(self, read: Read, buffer: memoryview) -> None:
        """Read up to the end of the buffer or the file; a short read goes on where it ended."""
        num_wanted = min(read.num_bytes, self._stamps[read.file].num_bytes - read.offset_bytes)
        num_done = 0
        while num_done < num_wanted:
            num_read = self._read_into(
                self._descriptors[read.file], buffer[num_done:], read.offset_bytes + num_done
            )
            num_now = num_done + num_read
            if num_now < num_wanted:
                num_now -= num_now % self._granularity_bytes
            if num_now <= num_done:
                raise CheckpointCorrupt(f"{read.file.name} is shorter than it was when opened")
            num_done = num_now

    def _why_not_direct(self, path: Path) -> str | None:
        """Try one direct read; the reason when it fails."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, ALIGNMENT_BYTES) as memory, memoryview(memory) as buffer:
                    self._read_into(descriptor, buffer, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            return os.strerror(error.errno or 0)
        return None

    def _stamp(self, path: Path) -> "_Stamp":
        status = os.fstat(self._descriptors[path])
        return _Stamp(num_bytes=status.st_size, modified_ns=status.st_mtime_ns)


class ReadMeter:
    """Counts bytes, and the time in which at least one read is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_since_ns = 0
        self._busy_ns = 0
        self.num_bytes = 0
        """Read so far."""

    def begin(self) -> None:
        """A read begins."""
        with self._lock:
            if self._num_running == 0:
                self._busy_since_ns = time.perf_counter_ns()
            self._num_running += 1

    def end(self, num_bytes: int) -> None:
        """A read has ended."""
        with self._lock:
            self._num_running -= 1
            self.num_bytes += num_bytes
            if self._num_running == 0:
                self._busy_ns += time.perf_counter_ns() - self._busy_since_ns

    @property
    def busy_ns(self) -> int:
        """Time with a read under way, so far."""
        with self._lock:
            running_ns = time.perf_counter_ns() - self._busy_since_ns if self._num_running else 0
            return self._busy_ns + running_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamp:
    """What changes when somebody writes to a file."""

    num_bytes: int
    modified_ns: int
