"""Attention over a ragged batch: all tokens of all sequences travel packed as one row [1, T].

Registered with transformers as attention implementation "headrace", so that any decoder that takes
the attention interface uses it. Reads and writes the block KV cache. Knows nothing of models.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from headrace.model.kv_cache import KVCache, KVSequence

IMPLEMENTATION = "headrace"


class Span:
    """The tokens of one sequence in a batch: positions start to start + num_tokens."""

    def __init__(self, sequence: KVSequence, num_tokens: int) -> None:
        self.start = sequence.length
        self.num_tokens = num_tokens
        self.end = self.start + num_tokens
        self.rows = sequence.rows[: self.end]
        self._masks: dict[int | None, Tensor | None] = {}

    def mask(self, sliding_window: int | None) -> Tensor | None:
        """[num_tokens, end] which positions each token sees; None when it sees all of them.

        Args:
            sliding_window: Positions a token sees, itself included; None for all before it.
        """
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._make_mask(sliding_window)
        return self._masks[sliding_window]

    def _make_mask(self, sliding_window: int | None) -> Tensor | None:
        if sliding_window is not None and self.end <= sliding_window:
            sliding_window = None  # it reaches back to the first position
        if self.num_tokens == 1 and sliding_window is None:
            return None
        query = torch.arange(self.start, self.end)[:, None]
        key = torch.arange(self.end)[None, :]
        mask = key <= query
        if sliding_window is not None:
            mask &= key > query - sliding_window
        return mask


class RaggedBatch:
    """What the attention of every layer needs to know of the batch."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self.cache = cache
        self.spans = spans
        self.write_rows = torch.cat([span.rows[span.start :] for span in spans])
        """[T] int64: where each packed token's key and value go."""


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    ragged_batch: RaggedBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend each sequence of the batch to its own cache.

    Args:
        module: The attention module; its layer_idx picks the layer's store.
        query: [1, H, T, D].
        key: [1, KV heads, T, D].
        value: [1, KV heads, T, D].
        attention_mask: Ignored; each span knows its own.
        scaling: Of the scores; D ** -0.5 by default.
        ragged_batch: The batch.
        sliding_window: Positions a token sees, itself included.
        softcap: Bound of the scores by tanh (gemma2).
        s_aux: [H] sink scores (gpt_oss).

    Returns:
        [1, T, H, D], and no attention weights.
    """
    layer_index = int(module.layer_idx)  # type: ignore[arg-type]
    keys = ragged_batch.cache.keys[layer_index]
    values = ragged_batch.cache.values[layer_index]
    keys.index_copy_(0, ragged_batch.write_rows, key[0].transpose(0, 1))
    values.index_copy_(0, ragged_batch.write_rows, value[0].transpose(0, 1))
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    offset = 0
    for span in ragged_batch.spans:
        end = offset + span.num_tokens
        attended = _attend(
            query[:, :, offset:end],
            keys.index_select(0, span.rows).transpose(0, 1)[None],
            values.index_select(0, span.rows).transpose(0, 1)[None],
            span.mask(sliding_window),
            scaling=scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        output[0, offset:end] = attended[0].transpose(0, 1)
        offset = end
    return output, None


def _attend(
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, KV heads, N, D]
    value: Tensor,  # [1, KV heads, N, D]
    mask: Tensor | None,  # [T, N]
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
) -> Tensor:
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    num_groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(num_groups, dim=1)
    value = value.repeat_interleave(num_groups, dim=1)
    scores = query @ key.transpose(-1, -2)  # [1, H, T, N]
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        column = sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1).to(scores.dtype)
        weights = torch.cat([scores, column], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(query.dtype) @ value


def register() -> None:
    """Make "headrace" known to transformers as an attention implementation."""
    AttentionInterface.register(IMPLEMENTATION, ragged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
