"""Maps shared memory in huge pages, where the kernel gives them.

A direct read of 4 MiB into scattered 4 KiB pages is more than a thousand pieces for the drive; on a
machine whose memory is fragmented that halves its rate. Huge pages need an aligned mapping, which
mmap does not promise, and on a memory file system without them (the usual /dev/shm) a request for
each range: MADV_COLLAPSE, Linux 6.1 and later (madvise(2)). Elsewhere small pages do.
"""

import ctypes
import mmap
import os
import weakref

_HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def map_shared(descriptor: int, num_bytes: int) -> memoryview:
    """[num_bytes] of a file, readable and writable, from its start.

    The mapping goes with the last view of it.

    Raises:
        OSError: The file cannot be mapped.
    """
    num_reserved = num_bytes + _HUGE_PAGE_BYTES
    reserved = _map(None, num_reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    try:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        _map(address, num_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, num_reserved)
        raise
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, reserved, num_reserved)
    return memoryview(memory).cast("B")


def use_huge_pages(memory: memoryview) -> bool:
    """Ask for huge pages under a mapping of `map_shared`; whether it has them now."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    num_bytes = len(memory) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    status: int = _libc.madvise(address, num_bytes, _MADV_COLLAPSE)
    return status == 0 and num_bytes > 0


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return mapped
