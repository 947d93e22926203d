"""Any other module with large parameters: they are all there while it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.conversion import ParameterSource
from headrace.model.operations.operation import Weights
from headrace.model.sweep_plan import Piece, WeightUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedParameter:
    """A parameter and the pieces that it is made of."""

    source: ParameterSource
    pieces: tuple[Piece, ...]
    """The rows of source.runs; or where there are none, the tensors that it is assembled from."""

    def build(self, rows: Sequence[Tensor]) -> Tensor:
        """The parameter from its borrowed pieces; a view of them where it can be."""
        if self.source.runs is None:
            tensors = {
                piece.span.name: tensor.view(piece.span.shape)
                for piece, tensor in zip(self.pieces, rows, strict=True)
            }
            return self.source.assemble(tensors)
        joined = rows[0] if len(rows) == 1 else torch.cat(list(rows))
        return joined.view(self.source.shape).to(self.source.dtype)


class WholeOperation:
    """Binds a module's parameters before it runs and unbinds them after."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, BorrowedParameter]) -> None:
        """Describe a module.

        Args:
            module: It owns the parameters.
            parameters: By their names in the whole model.
        """
        self.parameter_names = frozenset(parameters)
        self._module = module
        self._parameters = {
            name.rsplit(".", 1)[-1]: parameter for name, parameter in parameters.items()
        }

    def uses(self) -> list[WeightUse]:
        """All of it at once."""
        pieces = [piece for p in self._parameters.values() for piece in p.pieces]
        return [WeightUse(pieces=tuple(pieces), is_divisible=False)]

    def record(self, called: Callable[[], None]) -> None:
        """Compute with zeros; stacked experts, which would take long, only give zeros."""
        if all(len(parameter.source.shape) < 3 for parameter in self._parameters.values()):
            self._module.register_forward_pre_hook(lambda *_: called())
            return

        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            called()
            return torch.zeros_like(hidden_states)

        self._module.forward = forward

    def borrow(self, pieces: Sequence[range], weights: Weights) -> None:
        """Bind before each call and unbind after it, whether or not it succeeds."""
        (indices,) = pieces
        compute = self._module.forward

        def forward(*arguments: Any, **keywords: Any) -> Any:
            rows = [weights.acquire(index) for index in indices]
            try:
                self._bind(rows)
                output = compute(*arguments, **keywords)
            finally:
                self._unbind()
            for index in indices:
                weights.release(index)
            return output

        self._module.forward = forward

    def _bind(self, rows: Sequence[Tensor]) -> None:
        begin = 0
        for name, parameter in self._parameters.items():
            end = begin + len(parameter.pieces)
            self._set(name, parameter.build(rows[begin:end]))
            begin = end

    def _unbind(self) -> None:
        for name, parameter in self._parameters.items():
            source = parameter.source
            self._set(name, torch.empty(source.shape, dtype=source.dtype, device="meta"))

    def _set(self, name: str, tensor: Tensor) -> None:
        self._module._parameters[name] = tensor  # type: ignore[assignment]
