"""Keys and values of every live sequence, in blocks that are allocated once.

A sequence reserves the blocks it can ever need when it opens, so a running sequence never runs
out. Blocks are handed out in consecutive runs where one is long enough, so that attention reads
most sequences in place. Positions at or beyond a sequence's length are never read: truncating is
lowering the length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.errors import InvalidRequest, KVExhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVShape:
    """What one layer stores for one token."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVSequence:
    """The rows of one sequence and how many positions of them are filled."""

    def __init__(self, block_ids: list[int], block_size: int) -> None:
        self.length = 0
        self.span_start = 0
        """Where the tokens of the last forward pass begin."""
        self.block_ids = block_ids
        offsets = torch.arange(block_size)
        starts = torch.tensor(block_ids, dtype=torch.int64) * block_size
        self.rows = (starts[:, None] + offsets).flatten()
        """[capacity] int64: where position i lies in a layer's store."""
        self.is_consecutive = block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids)))
        """Whether the rows are one run of the store, in whatever order."""
        self.first_row = block_ids[0] * block_size
        """Where that run begins."""
        self.is_in_order = self.is_consecutive
        """Whether position i lies in row first_row + i."""

    @property
    def capacity(self) -> int:
        """Positions that the reserved blocks hold."""
        return self.rows.numel()

    def truncate(self, length: int) -> None:
        """Forget the positions from length on."""
        assert 0 <= length <= self.length
        self.length = length

    def keep(self, indices: Sequence[int]) -> None:
        """Keep some tokens of the last forward pass and forget its others.

        Nothing is copied: positions are given other rows, so that the rows of forgotten tokens come
        next.

        Args:
            indices: Of tokens within the pass, from a root of the tree to one of its nodes.
        """
        num_tokens = self.length - self.span_start
        kept = list(indices)
        assert kept == sorted(set(kept) & set(range(num_tokens)))
        self.length = self.span_start + len(kept)
        if kept == list(range(len(kept))):
            return
        order = kept + [index for index in range(num_tokens) if index not in set(kept)]
        rows = self.rows.clone()  # a span of the last pass may still look at the old ones
        span = slice(self.span_start, self.span_start + num_tokens)
        rows[span] = rows[span][torch.tensor(order)]
        self.rows = rows
        self.is_in_order = False


class KVCache:
    """The store of all layers, shared by all sequences."""

    def __init__(
        self,
        layers: Sequence[LayerKVShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate everything, and touch it: what is not there now shows now.

        Args:
            layers: [L] what each layer stores for one token.
            num_blocks: Blocks in all.
            block_size: Token positions in a block.
            dtype: Of keys and values.
            device: Of keys and values; everything else stays with the processor.
        """
        self.device = device
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_rows = num_blocks * block_size
        self.keys = [_store(num_rows, s.num_heads, s.key_dim, dtype, device) for s in layers]
        """[L] of [num_rows, H, D]."""
        self.values = [_store(num_rows, s.num_heads, s.value_dim, dtype, device) for s in layers]
        """[L] of [num_rows, H, D]."""
        self._free_block_ids = list(range(num_blocks))
        """In ascending order."""

    @property
    def capacity(self) -> int:
        """Token positions in all."""
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free_block_ids)

    def open(self, max_length: int) -> KVSequence:
        """Reserve blocks for a sequence that can grow to max_length positions.

        Raises:
            InvalidRequest: The cache could never hold it.
            KVExhausted: It could, once others have closed.
        """
        num_needed = -(-max_length // self.block_size)
        if num_needed > self.num_blocks:
            raise InvalidRequest(
                f"prompt and output of {max_length} tokens exceed the KV cache of {self.capacity} "
                "tokens: shorten the prompt or lower max_tokens",
                param="max_tokens",
            )
        if num_needed > len(self._free_block_ids):
            raise KVExhausted("the KV cache is full: try again when another request has ended")
        begin = self._first_fit(num_needed)
        taken = self._free_block_ids[begin : begin + num_needed]
        del self._free_block_ids[begin : begin + num_needed]
        return KVSequence(taken, self.block_size)

    def close(self, sequence: KVSequence) -> None:
        """Give the blocks of a sequence back."""
        self._free_block_ids = sorted(self._free_block_ids + sequence.block_ids)
        sequence.block_ids = []
        sequence.rows = sequence.rows[:0]
        sequence.length = 0

    def _first_fit(self, num_blocks: int) -> int:
        """Index of the first run of so many consecutive free blocks; 0 if there is none."""
        free = self._free_block_ids
        for begin in range(len(free) - num_blocks + 1):
            if free[begin + num_blocks - 1] - free[begin] == num_blocks - 1:
                return begin
        return 0


def _store(
    num_rows: int, num_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    store = torch.empty(num_rows, num_heads, width, dtype=dtype, device=device)
    return store.fill_(0)
