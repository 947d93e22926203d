"""Falcon's attention, through the interface that other decoders take.

transformers' own class computes attention itself and looks for an implementation by name in a table
of classes; this one joins that table.
"""

from typing import Any

from torch import Tensor
from transformers.models.falcon import modeling_falcon

from headrace.model.attention_interface import IMPLEMENTATION, attention_function


class FalconAttention(modeling_falcon.FalconAttention):  # type: ignore[misc]
    """Falcon's projections and rotary embedding around the attention of the pass under way."""

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> tuple[Tensor, None]:
        """As the class it replaces, for [1, T, hidden size].

        Args:
            hidden_states: [1, T, hidden size].
            attention_mask: A MaskRule.
            position_embeddings: Cosines and sines, each [1, T, D].

        Returns:
            [1, T, hidden size], and no attention weights.
        """
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        if self.new_decoder_architecture:  # which gives each query head a copy of its key head
            num_groups = self.num_heads // self.num_kv_heads
            key, value = key[:, :, ::num_groups], value[:, :, ::num_groups]
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        attended, _weights = attention_function(self, query, key, value, attention_mask)
        return self.dense(attended.flatten(2)), None


def register() -> None:
    """Make it Falcon's attention where "headrace" is asked for."""
    modeling_falcon.FALCON_ATTENTION_CLASSES[IMPLEMENTATION] = FalconAttention
