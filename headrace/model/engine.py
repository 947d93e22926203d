"""Runs a decoder over a ragged batch, its layers' weights resident or borrowed one by one.

Knows nothing of speculation, sampling or the wire.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import CheckpointCorrupt
from headrace.model.attention import RaggedBatch, Span
from headrace.model.checkpoint import Checkpoint, TensorSpan, Unit
from headrace.model.dtypes import torch_dtype
from headrace.model.kv_cache import KVCache, KVSequence
from headrace.model.module import UnboundModule


class LayerSource(Protocol):
    """Lends the weights of decoder layers, each once per forward pass, in order."""

    def acquire(self, layer_index: int) -> Mapping[str, Tensor]:
        """The layer's tensors by checkpoint name, valid until its release; blocks until ready."""

    def release(self, layer_index: int) -> None:
        """End the use of the layer's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens of one sequence in a forward pass; they follow what its KV already holds."""

    kv: KVSequence
    token_ids: Sequence[int]
    num_logits: int
    """Logits wanted for this many of the last tokens; may be 0."""


class Engine:
    """A decoder with its KV cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        kv_tokens: int,
        block_size: int = 16,
        layer_source: LayerSource | None = None,
    ) -> None:
        """Build the model and bind its resident weights.

        Args:
            checkpoint: What to run.
            kv_tokens: Token positions of KV in all.
            block_size: Token positions in a KV block.
            layer_source: Lends the decoder layers; None loads them to stay.

        Raises:
            ConfigError: The architecture is not supported.
            CheckpointCorrupt: Tensors are missing or have another shape.
        """
        self._unbound = UnboundModule(checkpoint.directory)
        self._unbound.require(set(checkpoint.tensors))
        self._unbound.bind(_load(checkpoint.resident))
        self._layer_source = layer_source
        for unit in checkpoint.units:
            if layer_source is None:
                self._unbound.bind(_load(unit.tensors))
            else:
                self._borrow(unit, layer_source)
        self.cache = KVCache(
            self._unbound.kv_shapes(),
            num_blocks=-(-kv_tokens // block_size),
            block_size=block_size,
            dtype=self._unbound.dtype,
        )

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
        spans = [Span(item.kv, len(item.token_ids)) for item in slices]
        token_ids = torch.tensor([[t for item in slices for t in item.token_ids]])  # [1, T]
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        wanted = _wanted_rows(slices)
        output = self._unbound.module(
            input_ids=token_ids,
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            ragged_batch=RaggedBatch(self.cache, spans),
        )
        for item, span in zip(slices, spans, strict=True):
            item.kv.length = span.end
        logits = output.logits[0].float()  # [sum of num_logits, V]
        return list(logits.split([item.num_logits for item in slices]))

    def _borrow(self, unit: Unit, source: LayerSource) -> None:
        """Let a layer acquire its weights as it begins and release them as it ends."""
        for span in unit.tensors:
            torch_dtype(span.dtype)  # refuse at the start what could not be used later
        index = unit.layer_index
        stem = unit.tensors[0].name.split(f".{index}.", 1)[0]
        layer = self._unbound.layer(f"{stem}.{index}")

        def acquire(*_: Any) -> None:
            self._unbound.bind(source.acquire(index))

        def release(*_: Any) -> None:
            source.release(index)

        layer.register_forward_pre_hook(acquire)
        layer.register_forward_hook(release)


def _wanted_rows(slices: Sequence[Slice]) -> Tensor:
    """Indices into the packed tokens whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for item in slices:
        end += len(item.token_ids)
        rows.extend(range(end - item.num_logits, end))
    return torch.tensor(rows, dtype=torch.int64)


def _load(spans: Sequence[TensorSpan]) -> dict[str, Tensor]:
    """Read tensors into memory of their own."""
    tensors = {}
    for span in spans:
        buffer = bytearray(span.num_bytes)
        with span.file.open("rb", buffering=0) as file:
            file.seek(span.offset_bytes)
            view = memoryview(buffer)
            while view:
                num_read = file.readinto(view)
                if not num_read:
                    raise CheckpointCorrupt(f"{span.file.name} ends before tensor {span.name}")
                view = view[num_read:]
        tensors[span.name] = torch.frombuffer(buffer, dtype=torch_dtype(span.dtype)).view(
            span.shape
        )
    return tensors
