"""Keys and values of every live sequence, in blocks that are allocated once.

A sequence reserves the blocks it can ever need when it opens, so a running sequence never runs
out. Positions at or beyond its length are never read: truncating is lowering the length.
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
    """The blocks of one sequence and how many positions of them are filled."""

    def __init__(self, block_ids: list[int], block_size: int) -> None:
        self.length = 0
        self.block_ids = block_ids
        offsets = torch.arange(block_size)
        starts = torch.tensor(block_ids, dtype=torch.int64) * block_size
        self.rows = (starts[:, None] + offsets).flatten()
        """[capacity] int64: where position i lies in a layer's store."""

    @property
    def capacity(self) -> int:
        """Positions that the reserved blocks hold."""
        return self.rows.numel()

    def truncate(self, length: int) -> None:
        """Forget the positions from length on."""
        assert 0 <= length <= self.length
        self.length = length


class KVCache:
    """The store of all layers, shared by all sequences."""

    def __init__(
        self,
        layers: Sequence[LayerKVShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate everything.

        Args:
            layers: [L] what each layer stores for one token.
            num_blocks: Blocks in all.
            block_size: Token positions in a block.
            dtype: Of keys and values.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        num_rows = num_blocks * block_size
        self.keys = [torch.zeros(num_rows, s.num_heads, s.key_dim, dtype=dtype) for s in layers]
        """[L] of [num_rows, H, D]."""
        self.values = [torch.zeros(num_rows, s.num_heads, s.value_dim, dtype=dtype) for s in layers]
        """[L] of [num_rows, H, D]."""
        self._free_block_ids = list(range(num_blocks - 1, -1, -1))

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
        taken = [self._free_block_ids.pop() for _ in range(num_needed)]
        return KVSequence(taken, self.block_size)

    def close(self, sequence: KVSequence) -> None:
        """Give the blocks of a sequence back."""
        self._free_block_ids.extend(reversed(sequence.block_ids))
        sequence.block_ids = []
        sequence.rows = sequence.rows[:0]
        sequence.length = 0
