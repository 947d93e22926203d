"""The experts of one Llama 4 layer, borrowed expert by expert.

Their module gets every token once for each expert, already weighed: zeros where the router did not
choose it. Both projections are stored with the input's dimension as rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

from headrace.model.operations.experts import ExpertsOperation
from headrace.model.operations.linear import multiply_transposed
from headrace.model.operations.operation import Weights


def is_batched_experts(module: nn.Module) -> bool:
    """Whether a module is of this kind."""
    return type(module) is Llama4TextExperts


class BatchedExpertsOperation(ExpertsOperation):
    """Expert e computes on the e-th part of its module's input."""

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
