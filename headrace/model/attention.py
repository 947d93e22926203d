"""Attention over a ragged batch: all tokens of all sequences travel packed as one row [1, T].

Which positions a token may see is the layer's rule (causal, sliding window, chunks), asked for by
position; which tokens of a tree it may see is the span's. Reads and writes the block KV cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.model.attention_interface import MaskRule, PackedPass, ScoreRule
from headrace.model.kv_cache import KVCache, KVSequence


class Span:
    """The tokens of one sequence in a batch: a chain or a tree after what its KV holds."""

    def __init__(
        self,
        sequence: KVSequence,
        num_tokens: int,
        parents: Sequence[int] | None = None,
        *,
        device: torch.device,
    ) -> None:
        """Lay the tokens out.

        Args:
            sequence: Where their keys and values go.
            num_tokens: How many.
            parents: [num_tokens] index within the span of each token's parent, before it, or -1
                for one that follows what the KV holds; None for a chain.
            device: Of the masks.
        """
        self._device = device
        self.start = sequence.length
        self.num_tokens = num_tokens
        self.end = self.start + num_tokens
        self.rows = sequence.rows[: self.end]
        """[end] int64: rows of the stored positions, then of the span's tokens."""
        self.lineage = _lineage(num_tokens, parents)
        """[num_tokens, num_tokens] bool: a token's ancestors and itself."""
        self.positions = self.start + self.lineage.sum(1) - 1
        """[num_tokens] int64: start + depth."""
        sequence.span_start = self.start
        self._first_row = sequence.first_row if sequence.is_consecutive else None
        self._columns = None if sequence.is_in_order else self._column_of_each_row()
        self._masks: dict[tuple[MaskRule, int], Tensor | None] = {}

    def read(self, store: Tensor) -> Tensor:
        """[N, H, D] the sequence's rows of a layer's store, in place unless they are scattered."""
        if self._first_row is None:
            return store.index_select(0, self.rows.to(store.device))
        width = self.end if self._columns is None else int(self._columns.max()) + 1
        return store[self._first_row : self._first_row + width]

    def mask(self, rule: MaskRule, num_groups: int) -> Tensor | None:
        """[num_groups * num_tokens, N] the rows each query sees; None when each sees them all.

        Args:
            rule: The layer's.
            num_groups: Query heads that share a key head: the mask is repeated so often.
        """
        if (rule, num_groups) not in self._masks:
            mask = self._make_mask(rule)
            sees_all = bool(mask.all())
            repeated = None if sees_all else mask.repeat(num_groups, 1).to(self._device)
            self._masks[rule, num_groups] = repeated
        return self._masks[rule, num_groups]

    def _make_mask(self, rule: MaskRule) -> Tensor:
        key_positions = torch.cat([torch.arange(self.start), self.positions])
        mask = rule.allows(self.positions, key_positions).clone()
        mask[:, self.start :] &= self.lineage
        if self._columns is None:
            return mask
        by_row = mask.new_zeros(self.num_tokens, int(self._columns.max()) + 1)
        by_row[:, self._columns] = mask
        return by_row

    def _column_of_each_row(self) -> Tensor | None:
        """[end] where rows that are one run, but out of order, lie within it."""
        return None if self._first_row is None else self.rows - self._first_row


def _lineage(num_tokens: int, parents: Sequence[int] | None) -> Tensor:
    if parents is None:
        return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    assert len(parents) == num_tokens
    lineage = torch.eye(num_tokens, dtype=torch.bool)
    for index, parent in enumerate(parents):
        assert -1 <= parent < index
        if parent >= 0:
            lineage[index] |= lineage[parent]
    return lineage


class RaggedBatch(PackedPass):
    """One pass over a batch: stores each token's key and value, attends each span to its own."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self.positions = torch.cat([span.positions for span in spans]).to(cache.device)
        """[T] int64."""
        super().__init__(self.positions)
        self.cache = cache
        self.spans = spans
        self.write_rows = torch.cat([span.rows[span.start :] for span in spans]).to(cache.device)
        """[T] int64: where each packed token's key and value go."""

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask_rule: MaskRule,
        score_rule: ScoreRule,
    ) -> Tensor:
        """See PackedPass."""
        keys, values = self.cache.keys[layer_index], self.cache.values[layer_index]
        keys.index_copy_(0, self.write_rows, key.transpose(0, 1))
        values.index_copy_(0, self.write_rows, value.transpose(0, 1))
        num_groups = query.shape[0] // key.shape[0]
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        offset = 0
        for span in self.spans:
            end = offset + span.num_tokens
            attended = _attend(
                # Query heads that share a key head come as more queries of it: keys are read once.
                query[:, offset:end].reshape(key.shape[0], -1, query.shape[2]),
                span.read(keys).transpose(0, 1),
                span.read(values).transpose(0, 1),
                span.mask(mask_rule, num_groups),
                score_rule,
            )
            output[offset:end] = attended.view(query.shape[0], -1, value.shape[2]).transpose(0, 1)
            offset = end
        return output


def _attend(
    query: Tensor,  # [KV heads, groups * T, D]
    key: Tensor,  # [KV heads, N, D]
    value: Tensor,  # [KV heads, N, value D]
    mask: Tensor | None,  # [groups * T, N]
    rule: ScoreRule,
) -> Tensor:  # [KV heads, groups * T, value D]
    if rule.softcap is None and rule.sinks is None:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=rule.scaling
        )[0]
    scores = query @ key.transpose(1, 2) * rule.scaling  # [KV heads, groups * T, N]
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is not None:
        num_queries = query.shape[0] * query.shape[1] // rule.sinks.numel()  # of each head
        column = rule.sinks.repeat_interleave(num_queries).view(*query.shape[:2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[1]]
    return weights.to(value.dtype) @ value
