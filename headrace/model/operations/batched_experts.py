"""The experts of one Llama 4 layer, borrowed expert by expert.

Their module gets every token once for each expert, already weighed: zeros where the router did not
choose it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from headrace.model.operations.linear import multiply_transposed
from headrace.model.operations.operation import Weights
from headrace.model.sweep_plan import Piece, WeightUse


def is_batched_experts(module: nn.Module) -> bool:
    """Whether a module is of this kind."""
    return type(module) is Llama4TextExperts


class BatchedExpertsOperation:
    """Expert e computes on the e-th part of its module's input."""

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
            up: [E] pieces of gate and up together, stored [hidden, 2 * width].
            down: [E] pieces of down, stored [width, hidden].
        """
        self.parameter_names = parameter_names
        self._module: Any = module
        self._uses = [
            WeightUse(pieces=tuple(pieces), is_divisible=True)
            for pair in zip(up, down, strict=True)
            for pieces in pair
        ]

    def uses(self) -> list[WeightUse]:
        """Of each expert gate and up, then down."""
        return self._uses

    def record(self, called: Callable[[], None]) -> None:
        """Give zeros."""

        def forward(hidden_states: Tensor) -> Tensor:
            called()
            return torch.zeros_like(hidden_states)

        self._module.forward = forward

    def borrow(self, pieces: Sequence[range], weights: Weights) -> None:
        """Compute with borrowed experts, on the tokens that chose them."""
        pairs = list(zip(pieces[::2], pieces[1::2], strict=True))
        width = self._module.expert_dim

        def forward(hidden_states: Tensor) -> Tensor:
            inputs = hidden_states.view(len(pairs), -1, hidden_states.shape[-1])
            outputs = torch.zeros_like(inputs)
            for (up, down), x, y in zip(pairs, inputs, outputs, strict=True):
                (tokens,) = torch.where(x.any(-1))
                h = multiply_transposed(x[tokens], weights, up, 2 * width)
                gate, linear = h.chunk(2, dim=-1)
                h = linear * self._module.act_fn(gate)
                y[tokens] = multiply_transposed(h, weights, down, y.shape[-1])
            return outputs.view(-1, hidden_states.shape[-1])

        self._module.forward = forward
