"""Runs a decoder over a ragged batch, its weights resident or borrowed piece by piece.

Knows nothing of speculation, sampling or the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.model.attention import RaggedBatch, Span
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.model.device import CPU
from headrace.model.kv_cache import KVCache, KVSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens of one sequence in a forward pass; they follow what its KV already holds."""

    kv: KVSequence
    token_ids: Sequence[int]
    num_logits: int
    """Logits wanted for this many of the last tokens; may be 0."""
    parents: Sequence[int] | None = None
    """Of a tree: index of each token's parent, -1 for those that follow the KV. None: a chain."""


class Engine:
    """A decoder with its KV cache."""

    def __init__(self, decoder: Decoder, *, kv_tokens: int, block_size: int = 16) -> None:
        """Add a KV cache to a decoder.

        Args:
            decoder: Its weights are loaded, or arranged to be borrowed.
            kv_tokens: Token positions of KV in all.
            block_size: Token positions in a KV block.
        """
        self._unbound = decoder.unbound
        self.cache = KVCache(
            self._unbound.kv_shapes(),
            num_blocks=-(-kv_tokens // block_size),
            block_size=block_size,
            dtype=self._unbound.dtype,
            device=decoder.device,
        )

    @classmethod
    def resident(
        cls,
        checkpoint: Checkpoint,
        *,
        kv_tokens: int,
        block_size: int = 16,
        device: torch.device = CPU,
    ) -> "Engine":
        """A model whose weights are all in memory.

        Raises:
            ConfigError: The architecture is not supported.
            CheckpointCorrupt: Tensors are missing or have another shape.
        """
        decoder = Decoder(checkpoint, device=device)
        decoder.load()
        return cls(decoder, kv_tokens=kv_tokens, block_size=block_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers, L."""
        return self._unbound.num_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the output, V."""
        return self._unbound.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence."""
        return min(self._unbound.max_context_tokens, self.cache.capacity)

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice]) -> list[Tensor]:
        """Run one pass; keys and values of all tokens are stored, and lengths grow with success.

        Args:
            slices: At least one; each sequence at most once.

        Returns:
            For each slice [num_logits, V] float32.
        """
        device = self.cache.device
        spans = [Span(i.kv, len(i.token_ids), i.parents, device=device) for i in slices]
        batch = RaggedBatch(self.cache, spans)
        token_ids = torch.tensor([[t for item in slices for t in item.token_ids]])  # [1, T]
        output = self._unbound.module(
            input_ids=token_ids.to(device),
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=_wanted_rows(slices).to(device),
            ragged_batch=batch,
        )
        for item, span in zip(slices, spans, strict=True):
            item.kv.length = span.end
        logits = output.logits[0].float().cpu()  # [sum of num_logits, V]
        return list(logits.split([item.num_logits for item in slices]))


def _wanted_rows(slices: Sequence[Slice]) -> Tensor:
    """Indices into the packed tokens whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for item in slices:
        end += len(item.token_ids)
        rows.extend(range(end - item.num_logits, end))
    return torch.tensor(rows, dtype=torch.int64)
