"""An evicted file is read from its disk again."""

import ctypes
import mmap
import os
from pathlib import Path

from headrace.bench.page_cache import evict


def _num_cached_pages(file: Path) -> int:
    """As the kernel counts them: mincore(2) over a mapping of the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = file.stat().st_size
    num_pages = -(-size // mmap.PAGESIZE)
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), size) as memory:
        buffer = (ctypes.c_char * size).from_buffer(memory)
        present = (ctypes.c_ubyte * num_pages)()
        assert libc.mincore(ctypes.byref(buffer), ctypes.c_size_t(size), present) == 0
        del buffer
    return sum(page & 1 for page in present)


def test_no_page_of_an_evicted_file_stays_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    assert _num_cached_pages(file) == 256
    evict([file])
    assert _num_cached_pages(file) == 0
