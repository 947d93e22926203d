"""A linear layer that works through the rows of its weight, one borrowed piece after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.formats import float8
from headrace.model.operations.operation import Weights, WeightSource
from headrace.model.sweep_plan import Piece, WeightUse


class LinearOperation:
    """y = s x W^T + b with W [out, in] in pieces of rows; b and scales s [out] stay in memory."""

    def __init__(
        self,
        module: nn.Linear,
        parameter_name: str,
        pieces: Sequence[Piece],
        scales: Sequence[Piece] = (),
    ) -> None:
        """Describe a layer.

        Args:
            module: The layer.
            parameter_name: Of its weight.
            pieces: The weight's rows.
            scales: Of each piece, if the weight has scales.
        """
        self.parameter_names = frozenset({parameter_name})
        self._module: Any = module
        self._pieces = tuple(pieces)
        self._scales = tuple(scales)
        self._is_checked = not self._scales

    def uses(self) -> list[WeightUse]:
        """The whole weight."""
        return [WeightUse(pieces=self._pieces, is_divisible=True)]

    def record(self, called: Callable[[], None]) -> None:
        """Give zeros."""

        def forward(x: Tensor) -> Tensor:
            called()
            return x.new_zeros(*x.shape[:-1], self._module.out_features)

        self._module.forward = forward

    def borrow(self, pieces: Sequence[range], weights: Weights) -> None:
        """Compute with borrowed pieces."""
        (indices,) = pieces
        scale = self._read_scale(weights)

        def forward(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            source = weights if self._is_checked else _Checked(weights, *self.parameter_names)
            output = multiply(rows, source, indices, self._module.out_features)
            self._is_checked = True
            if scale is not None:
                output *= scale
            if self._module.bias is not None:
                output += self._module.bias
            return output.view(*x.shape[:-1], self._module.out_features)

        self._module.forward = forward

    def _read_scale(self, weights: Weights) -> Tensor | None:
        """[out] in the type of the module."""
        if not self._scales:
            return None
        parts = [
            weights.read(scale).flatten().expand(piece.num_rows)
            for scale, piece in zip(self._scales, self._pieces, strict=True)
        ]
        return torch.cat(parts).to(self._module.weight.dtype)


def multiply(x: Tensor, weights: WeightSource, indices: range, num_rows: int) -> Tensor:
    """Compute x W^T, the rows of W borrowed piece by piece.

    Args:
        x: [T, columns].
        weights: Lends the pieces.
        indices: Of W's pieces, in order.
        num_rows: Of W.

    Returns:
        [T, num_rows].
    """
    output = x.new_empty(x.shape[0], num_rows)
    row = 0
    for index in indices:
        weight = weights.acquire(index)
        end = row + weight.shape[0]
        if x.shape[0]:
            _multiply_rows(x, weight, output[:, row:end])
        weights.release(index)
        row = end
    return output


def multiply_transposed(
    x: Tensor, weights: WeightSource, indices: range, num_columns: int
) -> Tensor:
    """Compute x W, the rows of W, which are summed over, borrowed piece by piece.

    Args:
        x: [T, rows of W].
        weights: Lends the pieces.
        indices: Of W's pieces, in order.
        num_columns: Of W.

    Returns:
        [T, num_columns]; the products of several pieces are summed in float32.
    """
    output = x.new_zeros(x.shape[0], num_columns, dtype=torch.float32)
    row = 0
    for index in indices:
        weight = weights.acquire(index)
        end = row + weight.shape[0]
        output += x[:, row:end] @ weight.to(x.dtype)
        weights.release(index)
        row = end
    return output.to(x.dtype)


class _Checked:
    """Looks at float8 weights as they pass for the first time."""

    def __init__(self, weights: WeightSource, name: str) -> None:
        self._weights = weights
        self._name = name
        self.release = weights.release

    def acquire(self, piece_index: int) -> Tensor:
        """See WeightSource."""
        weight = self._weights.acquire(piece_index)
        float8.check_numbers(weight, self._name)
        return weight


def _multiply_rows(x: Tensor, weight: Tensor, output: Tensor) -> None:
    if weight.dtype == float8.DTYPE:
        float8.multiply(x, weight, output)
    else:
        torch.mm(x, weight.to(x.dtype).T, out=output)
