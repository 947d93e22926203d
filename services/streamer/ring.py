"""The slots of one stream: a file in shared memory that every target of the stream maps."""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from headrace.errors import PeerUnavailable
from headrace.shared_memory import map_shared, use_huge_pages

_PREFIX = "headrace-"


class Ring:
    """num_slots buffers of slot_bytes each.

    The memory goes with the last reference to it: a read that still runs keeps it. The file is
    locked for as long as its streamer lives, so that what a killed one leaves can be told.
    """

    def __init__(self, directory: Path, *, slot_bytes: int, num_slots: int) -> None:
        """Choose a name; `allocate` makes the memory.

        Args:
            directory: On a memory file system.
            slot_bytes: A multiple of the page size.
            num_slots: At least 1.
        """
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.path = directory / f"{_PREFIX}{secrets.token_hex(16)}"
        self._descriptor: int | None = None
        self._view = memoryview(b"")

    def allocate(self) -> None:
        """Make and map the memory; takes long where there is much of it.

        Raises:
            PeerUnavailable: There is not enough shared memory.
        """
        num_bytes = self.slot_bytes * self.num_slots
        try:
            self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self._view = map_shared(self._descriptor, num_bytes)
            use_huge_pages(self._view)
        except OSError as error:
            self.close()
            raise PeerUnavailable(
                f"no shared memory for {self.num_slots} slots of {self.slot_bytes:,} bytes "
                f"({os.strerror(error.errno or 0)}): enlarge it, or set HEADRACE_SLOTS to fewer"
            ) from None

    def slot(self, index: int) -> memoryview:
        """The memory of one slot."""
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Remove the name: whoever mapped the memory keeps it, nobody else can find it."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
        self._view = memoryview(b"")


def remove_abandoned(directory: Path) -> None:
    """Remove the rings of streamers that were killed."""
    for path in directory.glob(f"{_PREFIX}*"):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError):  # locked by its streamer, or just gone
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
