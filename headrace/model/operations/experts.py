"""The experts of one layer, borrowed expert by expert.

For the expert modules that transformers builds with its experts interface: one stacked parameter
for the first projection of all experts and one for the second.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.model.operations.linear import multiply, multiply_transposed
from headrace.model.operations.operation import Weights, WeightSource
from headrace.model.sweep_plan import Piece, WeightUse


def is_experts(module: nn.Module) -> bool:
    """Whether a module follows the experts interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "num_experts"))


def first_projection(module: nn.Module) -> str:
    """Name of the parameter that an expert's input meets."""
    return "gate_up_proj" if module.has_gate else "up_proj"


class ExpertsOperation:
    """Every token goes through the experts that its router chose."""

    def __init__(
        self,
        module: nn.Module,
        parameter_names: frozenset[str],
        up: Sequence[Sequence[Piece]],
        down: Sequence[Sequence[Piece]],
    ) -> None:
        """Describe a layer's experts.

        Args:
            module: The experts.
            parameter_names: Of the two projections.
            up: [E] the first projection's pieces.
            down: [E] the second's.
        """
        self.parameter_names = parameter_names
        self._module: Any = module
        self._up = up
        self._down = down

    def uses(self) -> list[WeightUse]:
        """Of each expert the first projection, then the second."""
        return [
            WeightUse(pieces=tuple(pieces), is_divisible=True)
            for pair in zip(self._up, self._down, strict=True)
            for pieces in pair
        ]

    def record(self, called: Callable[[], None]) -> None:
        """Give zeros."""

        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            called()
            return torch.zeros_like(hidden_states)

        self._module.forward = forward

    def borrow(self, pieces: Sequence[range], weights: Weights) -> None:
        """Compute with borrowed experts."""
        pairs = list(zip(pieces[::2], pieces[1::2], strict=True))

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            output = torch.zeros_like(hidden_states)
            for expert, (up, down) in enumerate(pairs):
                tokens, choices = torch.where(top_k_index == expert)
                y = self._expert(expert, hidden_states[tokens], up, down, weights)
                y = y * top_k_weights[tokens, choices, None]
                output.index_add_(0, tokens, y.to(output.dtype))
            return output

        self._module.forward = forward

    def _expert(
        self, expert: int, x: Tensor, up: range, down: range, weights: WeightSource
    ) -> Tensor:
        module = self._module
        name = first_projection(module)
        h = self._project(name, expert, x, up, weights)
        h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
        y = self._project("down_proj", expert, h, down, weights)
        return module.post_expert_norm(y) if module.has_post_expert_norm else y

    def _project(
        self, name: str, expert: int, x: Tensor, pieces: range, weights: WeightSource
    ) -> Tensor:
        shape = getattr(self._module, name).shape
        if self._module.is_transposed:
            y = multiply_transposed(x, weights, pieces, shape[2])
        else:
            y = multiply(x, weights, pieces, shape[1])
        if self._module.has_bias:
            y = y + getattr(self._module, f"{name}_bias")[expert]
        return y
