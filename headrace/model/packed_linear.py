"""Linear layers whose weights stay in memory, laid out as the processor's kernels read them.

oneDNN (https://uxlfoundation.github.io/oneDNN, "reordering weights") multiplies a few rows by
bfloat16 weights in the layout of a checkpoint at 8 GB/s of weights on two cores, and in its own at
12. The products are the same numbers. torch's compiler uses the same two operators.
"""

from typing import Any

import torch
from torch import Tensor, nn


def pack_linear_layers(module: nn.Module) -> None:
    """Lay the weights of all linear layers out anew, where that is of use.

    Args:
        module: A model on the processor; weights that other modules share stay as they are.
    """
    if not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    shared = _shared(module)
    for layer in module.modules():
        is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if is_plain and layer.weight.dtype == torch.bfloat16 and id(layer.weight) not in shared:
            _pack(layer)


def _shared(module: nn.Module) -> set[int]:
    """Identities of the parameters with more than one place."""
    seen: set[int] = set()
    shared: set[int] = set()
    for owner in module.modules():
        for parameter in owner._parameters.values():
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _pack(layer: Any) -> None:
    weight: Tensor = layer.weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    bias = layer.bias

    def forward(x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return product

    layer.forward = forward
    layer._parameters["weight"] = torch.empty_like(weight, device="meta")
