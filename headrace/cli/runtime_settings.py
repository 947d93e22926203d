"""What the C libraries below the processes are told: memory that stays as it was, few idle spins.

deploy/Dockerfile says the same to processes in containers; docs/decisions 0011 and 0012 say why.
"""

RUNTIME_SETTINGS = {
    # Several processes with OpenMP on few cores stall each other when idle threads spin.
    "GOMP_SPINCOUNT": "30000",
    # torch and oneDNN keep the code that they make for every number of rows: 1,024 take 400 MB.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # Large activations go back to the system as they end, instead of leaving holes in many heaps;
    # huge pages make them cheap to get again.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
