"""Mappings against what the kernel says of this process and of the machine."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.shared_memory import map_shared, use_huge_pages

HUGE = 2 << 20


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir="/dev/shm") as stream:
        os.posix_fallocate(stream.fileno(), 0, 3 * HUGE)
        yield stream.fileno()


def mapped_bytes(descriptor: int) -> int:
    """Of the file, in this process."""
    inode = str(os.fstat(descriptor).st_ino)
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, number, *_ = line.split()
        if number == inode:
            begin, end = (int(address, 16) for address in place.split("-"))
            total += end - begin
    return total


def huge_bytes() -> int:
    """Of shared memory in huge pages, in this process."""
    text = Path("/proc/self/smaps").read_text()
    return sum(
        1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("ShmemPmd")
    )


def test_two_mappings_of_a_file_are_one_memory(file: int) -> None:
    one, two = map_shared(file, 3 * HUGE), map_shared(file, 3 * HUGE)
    one[HUGE + 5] = 77
    assert two[HUGE + 5] == 77
    assert os.pread(file, 1, HUGE + 5) == b"M"


def test_a_mapping_goes_with_its_last_view(file: int) -> None:
    memory = map_shared(file, 3 * HUGE)
    part = memory[HUGE : HUGE + 10]
    del memory
    gc.collect()
    assert mapped_bytes(file) == 3 * HUGE
    del part
    gc.collect()
    assert mapped_bytes(file) == 0


def test_huge_pages_keep_what_was_written(file: int) -> None:
    memory = map_shared(file, 3 * HUGE)
    memory[:] = bytes(range(256)) * (3 * HUGE // 256)
    before = huge_bytes()
    if not use_huge_pages(memory):
        pytest.skip("this kernel gives no huge pages for shared memory")
    assert huge_bytes() - before == 3 * HUGE
    assert memory == bytes(range(256)) * (3 * HUGE // 256)


def test_less_than_a_huge_page_stays_in_small_ones(file: int) -> None:
    assert not use_huge_pages(map_shared(file, 4096))


def test_what_cannot_be_mapped_is_told() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_shared(-1, 4096)
