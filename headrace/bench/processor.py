"""How fast this machine computes with weights that are in memory."""

import time

import torch
from torch.nn.functional import linear

_NUM_COLUMNS = 4096
_WEIGHT_BYTES = 64 << 20
"""More than caches hold."""
_NUM_REPEATS = 5


@torch.inference_mode()
def weights_gb_per_s(dtype: torch.dtype, *, num_tokens: int) -> float:
    """GB of weights that a linear layer gets through in a second: the best of some tries.

    Args:
        dtype: Of weights and activations.
        num_tokens: In the sweep: many of them make it slower.
    """
    weight = torch.ones(_WEIGHT_BYTES // dtype.itemsize // _NUM_COLUMNS, _NUM_COLUMNS, dtype=dtype)
    hidden = torch.ones(num_tokens, _NUM_COLUMNS, dtype=dtype)
    seconds = []
    for _ in range(_NUM_REPEATS):
        began_s = time.perf_counter()
        linear(hidden, weight)
        seconds.append(time.perf_counter() - began_s)
    return _WEIGHT_BYTES / min(seconds) / 1e9
