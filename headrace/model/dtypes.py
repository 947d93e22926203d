"""The element types of checkpoints, as safetensors spells them, and torch's."""

import torch

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Those that models compute in."""
