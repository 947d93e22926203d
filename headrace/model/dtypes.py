"""The element types of checkpoints, as safetensors spells them, and torch's."""

import torch

from headrace.errors import ConfigError

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Those that models compute in, and those that headrace.model.formats unpacks."""


def torch_dtype(name: str) -> torch.dtype:
    """The element type of that name.

    Raises:
        ConfigError: It cannot be served.
    """
    if name not in _TORCH_DTYPES:
        raise ConfigError(
            f"weights of type {name} cannot be served yet: give a checkpoint in BF16, F16, F32 or "
            "float8 (E4M3)"
        )
    return _TORCH_DTYPES[name]
