"""A memory limit for processes and the page cache that they fill: a control group of the kernel."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT_S = 5.0
"""For the kernel to notice that the group's processes have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """A limit that commands can be started within."""

    num_bytes: int | None
    """None: there is no limit."""
    group: Path | None
    """Directory of the control group."""

    def command(self, *command: str) -> tuple[str, ...]:
        """What runs a command within the limit; it keeps the process id."""
        if self.group is None:
            return command
        return ("sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(self.group), *command)


@contextmanager
def memory_cap(num_bytes: int) -> Iterator[MemoryCap]:
    """A limit for all that is started through it; none where this user may not set one.

    Args:
        num_bytes: Of its processes together, page cache included.
    """
    group = _make_group(num_bytes)
    try:
        yield MemoryCap(num_bytes=None if group is None else num_bytes, group=group)
    finally:
        if group is not None:
            _remove(group)


def _make_group(num_bytes: int) -> Path | None:
    """A group with the limit, in version 1 or 2 of control groups."""
    is_v1 = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if is_v1 else _ROOT) / f"headrace-bench-{os.getpid()}"
    try:
        if not is_v1:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError:
        return None
    # Version 1 limits memory and swap together, version 2 each of them.
    swap = ("memory.memsw.limit_in_bytes", num_bytes) if is_v1 else ("memory.swap.max", 0)
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(num_bytes))
    except OSError:
        _remove(group)
        return None
    with suppress(OSError):  # a kernel that does not account for swap
        (group / swap[0]).write_text(str(swap[1]))
    return group


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _REMOVE_TIMEOUT_S
    while group.is_dir() and time.monotonic() < deadline:
        with suppress(OSError):  # its last process is only just ending
            group.rmdir()
            return
        time.sleep(0.05)
