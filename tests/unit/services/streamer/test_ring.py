"""The shared memory of one stream, whatever becomes of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import PeerUnavailable
from services.streamer.ring import Ring, remove_abandoned
from tests.support.streamer_rig import is_empty, num_mappings, shared_memory_dir


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with shared_memory_dir() as directory:
        yield directory


def test_slots_lie_one_after_the_other_in_the_file(shared_memory: Path) -> None:
    ring = Ring(shared_memory, slot_bytes=4096, num_slots=3)
    ring.allocate()
    for index in range(3):
        ring.slot(index)[:] = bytes([index]) * 4096
    assert ring.path.read_bytes() == b"\0" * 4096 + b"\1" * 4096 + b"\2" * 4096


def test_memory_outlives_its_name_and_goes_with_its_last_user(shared_memory: Path) -> None:
    ring = Ring(shared_memory, slot_bytes=4096, num_slots=1)
    ring.allocate()
    slot = ring.slot(0)
    ring.close()
    del ring
    assert is_empty(shared_memory)
    slot[:5] = b"still"
    assert num_mappings(shared_memory) == 1
    del slot
    assert num_mappings(shared_memory) == 0


def test_what_a_killed_streamer_leaves_is_removed_and_what_a_living_one_has_is_not(
    shared_memory: Path,
) -> None:
    alive = Ring(shared_memory, slot_bytes=4096, num_slots=1)
    alive.allocate()
    (shared_memory / "headrace-left").write_bytes(bytes(4096))  # nobody holds its lock
    (shared_memory / "another").write_bytes(b"of other programs")
    (shared_memory / "headrace-directory").mkdir()
    remove_abandoned(shared_memory)
    names = {path.name for path in shared_memory.iterdir()}
    assert names == {alive.path.name, "another", "headrace-directory"}
    alive.close()


def test_too_little_memory_leaves_no_file_and_names_no_path(shared_memory: Path) -> None:
    ring = Ring(shared_memory, slot_bytes=1 << 50, num_slots=1)
    with pytest.raises(PeerUnavailable) as caught:
        ring.allocate()
    assert str(shared_memory) not in caught.value.message
    assert is_empty(shared_memory)
