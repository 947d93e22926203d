"""What is started within a cap cannot take more."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.bench.memory_cap import MemoryCap, memory_cap

_CAP_BYTES = 100 << 20


@pytest.fixture
def cap() -> Iterator[MemoryCap]:
    with memory_cap(_CAP_BYTES) as made:
        if made.num_bytes is None:
            pytest.skip("this user may not set a memory cap")
        yield made


def _exit_code(cap: MemoryCap, num_bytes: int) -> int:
    program = f"print(len(bytearray(b'1') * {num_bytes}))"
    command = cap.command(sys.executable, "-S", "-c", program)
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_a_process_above_its_cap_is_killed_and_one_below_is_not(cap: MemoryCap) -> None:
    assert _exit_code(cap, _CAP_BYTES // 2) == 0
    assert _exit_code(cap, 2 * _CAP_BYTES) == -9


def test_the_command_keeps_the_process_id(cap: MemoryCap) -> None:
    command = cap.command(sys.executable, "-S", "-c", "import os; print(os.getpid())")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert int(output) == process.pid


def test_the_group_goes_with_its_last_user() -> None:
    with memory_cap(_CAP_BYTES) as cap:
        group = cap.group
    assert group is None or not group.exists()


def test_without_a_cap_the_command_stays_as_it_is() -> None:
    assert MemoryCap(num_bytes=None, group=None).command("a", "b") == ("a", "b")


def test_this_process_is_not_within_the_cap(cap: MemoryCap) -> None:
    assert cap.group is not None
    assert str(os.getpid()) not in (cap.group / "cgroup.procs").read_text().split()
