"""Reads pieces of checkpoint files past the page cache, where the file system allows it."""

import logging
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.errors import CheckpointCorrupt, PeerUnavailable
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
        reason = next(filter(None, map(_why_not_direct, paths)), None)
        self.is_direct = reason is None
        if reason is not None:
            logger.warning(
                "reading through the page cache, which is slower and takes memory: the file "
                "system of %s refuses direct reads (%s)",
                paths[0].parent,
                reason,
            )
        flags = os.O_RDONLY | (os.O_DIRECT if self.is_direct else 0)
        self._descriptors = {path: os.open(path, flags) for path in paths}
        self._stamps = {path: self._stamp(path) for path in paths}

    def read(self, read: Read, slot: memoryview) -> None:
        """Bring a piece of a file to its place in a slot.

        Raises:
            CheckpointCorrupt: The file ends early or was changed since it was opened.
            PeerUnavailable: The device failed.
        """
        num_bytes, modified_ns = self._stamps[read.file]
        num_wanted = min(read.num_bytes, num_bytes - read.offset_bytes)
        buffer = slot[read.slot_offset_bytes : read.slot_offset_bytes + read.num_bytes]
        num_done = 0
        try:
            while num_done < num_wanted:
                num_read = self._read_into(
                    self._descriptors[read.file], buffer[num_done:], read.offset_bytes + num_done
                )
                if num_read <= 0:
                    raise CheckpointCorrupt(f"{read.file.name} is shorter than it was when opened")
                num_done += num_read
                if num_done < num_wanted:  # a direct read goes on at an aligned offset only
                    num_done -= num_done % ALIGNMENT_BYTES
        except OSError as error:
            raise PeerUnavailable(
                f"{read.file.name} cannot be read: {os.strerror(error.errno or 0)}"
            ) from None
        if self._stamp(read.file) != (num_bytes, modified_ns):
            raise CheckpointCorrupt(f"{read.file.name} was changed while it was served")

    def _stamp(self, path: Path) -> tuple[int, int]:
        """Size and time of the last change."""
        status = os.fstat(self._descriptors[path])
        return status.st_size, status.st_mtime_ns


def _why_not_direct(path: Path) -> str | None:
    """Try one direct read; the reason when it fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as memory:
                os.preadv(descriptor, [memory], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None
