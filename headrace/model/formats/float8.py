"""Float8 weights (E4M3) with one scale for each output channel or one for the whole tensor.

As compressed-tensors stores them (https://github.com/vllm-project/compressed-tensors, format
float-quantized): beside each `weight` a `weight_scale`. Weights alone are in float8: activations
are kept as they are. A product is scaled after it is summed: sum_c x_c (s w_c) = s sum_c x_c w_c.

E4M3 (https://arxiv.org/abs/2209.05433) is a sign, 4 bits of exponent with bias 7 and 3 of mantissa.
The same bits in bfloat16's places (8 bits of exponent with bias 127) are a number 2^120 times
smaller, subnormal ones included, so that unpacking is shifts and one product. Two float8 numbers
are unpacked at once from the 16 bits that they share.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model.checkpoint import TensorSpan
from headrace.model.sweep_plan import Piece

DTYPE = torch.float8_e4m3fn
_MASK = -0x7810  # of 16 bits: the sign, 4 bits of exponent and 3 of mantissa, in bfloat16's places
_EXPONENT_GAP = 2.0**120
_NAN = 0x7F
_BLOCK_ELEMENTS = 2 << 20
"""Unpacked at once: they stay in the processor's cache until they are multiplied."""


def check_quantization(quantization: Mapping[str, Any]) -> None:
    """Refuse a quantization_config that says anything else than this format.

    Raises:
        ConfigError: It does.
    """
    groups = quantization.get("config_groups") or {}
    kinds = [group.get("weights") or {} for group in groups.values()]
    is_known = quantization.get("quant_method") == "compressed-tensors" and all(
        kind.get("type") == "float"
        and kind.get("num_bits") == 8
        and kind.get("strategy") in {"channel", "tensor"}
        for kind in kinds
    )
    if not (is_known and kinds):
        raise ConfigError(
            f"its weights are quantized ({quantization.get('quant_method')}); choose the same "
            "model in BF16, F16 or F32, or in compressed-tensors' float8 with scales per channel"
        )


def is_float8(span: TensorSpan) -> bool:
    """Whether a tensor is of this format."""
    return span.dtype == "F8_E4M3"


def scale_of(piece: Piece, tensors: Mapping[str, TensorSpan]) -> Piece:
    """Where the scales of some rows are.

    Raises:
        CheckpointCorrupt: The checkpoint lacks them, or they are of another shape.
        ConfigError: The rows cannot be unpacked.
    """
    if not is_float8(piece.span) or piece.num_columns % 2:
        raise ConfigError(
            f"tensor {piece.span.name} is {piece.span.dtype} with {piece.num_columns} columns: "
            "scaled weights must be float8 (E4M3) in rows of even length"
        )
    name = f"{piece.span.name}_scale"
    span = tensors.get(name)
    if span is None:
        raise CheckpointCorrupt(f"tensor {piece.span.name} is float8, but {name} is missing")
    if span.shape == (piece.span.shape[0], 1):
        return Piece(span=span, begin_row=piece.begin_row, end_row=piece.end_row)
    if span.shape in {(), (1,), (1, 1)}:
        return Piece(span=span, begin_row=0, end_row=1)
    raise CheckpointCorrupt(
        f"tensor {name} has shape {list(span.shape)}: one scale for each row of "
        f"{piece.span.name} is needed, or one for all"
    )


def check_numbers(weight: Tensor, name: str) -> None:
    """Refuse NaN, which unpacking does not know.

    Raises:
        CheckpointCorrupt: There is one.
    """
    if ((weight.view(torch.uint8) & _NAN) == _NAN).any():
        raise CheckpointCorrupt(f"tensor {name} holds NaN")


def multiply(x: Tensor, weight: Tensor, output: Tensor) -> None:
    """Write x W^T, unscaled.

    Args:
        x: [T, C] of any floating type.
        weight: [R, C] float8, C even.
        output: [T, R] of x's type, any strides.
    """
    if weight.is_cuda:  # converts faster than memory brings the numbers
        torch.mm(x, weight.to(x.dtype).T, out=output)
        return
    num_rows, num_columns = weight.shape
    half = num_columns // 2
    split = torch.cat([x[:, ::2], x[:, 1::2]], dim=1)  # as unpacked weights lie
    block_rows = max(1, min(num_rows, _BLOCK_ELEMENTS // num_columns))
    unpacked = torch.empty(block_rows, num_columns, dtype=torch.int16)
    for begin in range(0, num_rows, block_rows):
        block = _pairs(weight[begin : begin + block_rows])
        bits = unpacked[: block.shape[0]]
        low, high = bits[:, :half], bits[:, half:]
        torch.bitwise_left_shift(block, 8, out=low)  # the lower byte is the even column
        low.bitwise_right_shift_(4)
        torch.bitwise_right_shift(block, 4, out=high)
        numbers = bits.bitwise_and_(_MASK).view(torch.bfloat16).mul_(_EXPONENT_GAP)
        matrix = numbers.to(x.dtype).T
        torch.mm(split, matrix, out=output[:, begin : begin + block.shape[0]])


def _pairs(block: Tensor) -> Tensor:
    """[R, C / 2] int16; a copy if the block lies at an odd place in its file."""
    return (block.clone() if block.data_ptr() % 2 else block).view(torch.int16)
