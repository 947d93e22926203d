"""An embedding whose rows are read from the file as tokens need them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import CheckpointCorrupt, PeerUnavailable
from headrace.model.dtypes import torch_dtype
from headrace.model.integrity import Integrity
from headrace.model.sweep_plan import Piece


class EmbeddingRows:
    """Gives an embedding module just the rows that a pass asks for."""

    def __init__(
        self,
        module: nn.Embedding,
        pieces: Sequence[Piece],
        integrity: Integrity,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take over a module.

        Args:
            module: The embedding.
            pieces: Its rows in the files.
            integrity: Checks the rows, with what lies around them.
            dtype: What the model computes in.
            device: Where the module is.
        """
        self._pieces = tuple(pieces)
        self._integrity = integrity
        self._dtype = dtype
        self._device = device
        paths = {piece.span.file for piece in pieces}
        self._descriptors = {path: os.open(path, os.O_RDONLY) for path in paths}
        self._stamps = {path: self._stamp(path) for path in paths}
        module.padding_idx = None  # it would have to lie among the few rows
        self._give(module, torch.empty(0, module.embedding_dim, dtype=dtype))  # off the meta device
        module.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        token_ids, *others = arguments
        unique, positions = torch.unique(token_ids, return_inverse=True)
        rows = torch.stack([self._row(index) for index in unique.tolist()])
        self._give(module, rows.to(self._device))
        return (positions, *others)

    @staticmethod
    def _give(module: nn.Module, rows: Tensor) -> None:
        module._parameters["weight"] = rows  # type: ignore[assignment]

    def _row(self, index: int) -> Tensor:
        for piece in self._pieces:
            if index < piece.num_rows:
                return self._read(piece, index).to(self._dtype)
            index -= piece.num_rows
        raise AssertionError("token ids are checked when a sequence is opened")

    def _read(self, piece: Piece, row: int) -> Tensor:
        num_bytes = piece.num_bytes // piece.num_rows
        offset = piece.offset_bytes + row * num_bytes
        self._integrity.check_around(piece.span, offset - piece.span.offset_bytes, num_bytes)
        file = piece.span.file
        buffer = bytearray(num_bytes)
        try:
            num_read = os.preadv(self._descriptors[file], [buffer], offset)
        except OSError as error:
            raise PeerUnavailable(
                f"{file.name} cannot be read: {os.strerror(error.errno or 0)}"
            ) from None
        if num_read != num_bytes or self._stamp(file) != self._stamps[file]:
            raise CheckpointCorrupt(
                f"{file.name} was changed while it was served: restart the target"
            )
        return torch.frombuffer(buffer, dtype=torch_dtype(piece.span.dtype))

    def _stamp(self, path: Path) -> tuple[int, int]:
        """What changes when somebody writes to a file: its size and the time of the last write."""
        status = os.fstat(self._descriptors[path])
        return status.st_size, status.st_mtime_ns
