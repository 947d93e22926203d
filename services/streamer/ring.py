"""The slots of one session: a file in shared memory that lives as long as somebody maps it."""

import mmap
import os
import secrets
from pathlib import Path

from headrace.errors import PeerUnavailable


class Ring:
    """num_slots buffers of slot_bytes each, shared with one target.

    The memory goes with the last reference to it: a read that still runs keeps it.
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
        self.path = directory / f"headrace-{secrets.token_hex(16)}"
        self._is_unlinked = False
        self._view = memoryview(b"")

    def allocate(self) -> None:
        """Make and map the memory; takes long where there is much of it.

        Raises:
            PeerUnavailable: There is not enough shared memory.
        """
        num_bytes = self.slot_bytes * self.num_slots
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
                self._view = memoryview(mmap.mmap(descriptor, num_bytes))
            finally:
                os.close(descriptor)
        except OSError as error:
            self.unlink()
            raise PeerUnavailable(
                f"no shared memory for {self.num_slots} slots of {self.slot_bytes:,} bytes "
                f"({os.strerror(error.errno or 0)}): enlarge it, or set HEADRACE_STREAMER_SLOTS "
                "to fewer"
            ) from None
        if self._is_unlinked:  # on the loop, while this thread was not through
            self.unlink()

    def slot(self, index: int) -> memoryview:
        """The memory of one slot."""
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def unlink(self) -> None:
        """Remove the name: whoever mapped the memory keeps it, nobody else can find it."""
        self._is_unlinked = True
        self.path.unlink(missing_ok=True)
