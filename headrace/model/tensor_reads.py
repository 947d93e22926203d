"""Reads tensors, or rows of them, into memory of their own, and checks what it read."""

from collections.abc import Iterable

import torch
from torch import Tensor

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import TensorSpan
from headrace.model.dtypes import torch_dtype
from headrace.model.integrity import Integrity
from headrace.model.sweep_plan import Piece


def read_tensors(spans: Iterable[TensorSpan], integrity: Integrity) -> dict[str, Tensor]:
    """Whole tensors by name, in the types and shapes of their files.

    Raises:
        CheckpointCorrupt: A file ends early, or a tensor is not what the manifest says.
    """
    return {
        span.name: _read(span, 0, span.num_bytes, integrity)
        .view(torch_dtype(span.dtype))
        .view(span.shape)
        for span in spans
    }


def read_piece(piece: Piece, integrity: Integrity) -> Tensor:
    """[rows, columns] of a tensor, in the type of its file.

    Raises:
        CheckpointCorrupt: The file ends early, or the rows are not what the manifest says.
    """
    offset = piece.offset_bytes - piece.span.offset_bytes
    data = _read(piece.span, offset, piece.num_bytes, integrity)
    return data.view(torch_dtype(piece.span.dtype)).view(piece.num_rows, piece.num_columns)


def _read(span: TensorSpan, offset_bytes: int, num_bytes: int, integrity: Integrity) -> Tensor:
    """[num_bytes] uint8, from offset_bytes of the tensor on."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8)
    data = view = tensor.numpy().data
    with span.file.open("rb", buffering=0) as file:
        file.seek(span.offset_bytes + offset_bytes)
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise CheckpointCorrupt(f"{span.file.name} ends before tensor {span.name}")
            view = view[num_read:]
    integrity.check(span, offset_bytes, data)
    return tensor
