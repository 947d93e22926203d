"""Compares weights with the manifest the first time that they are read, if there is a manifest.

Any piece of a tensor is checked by itself. What is hashed is the memory that the piece was read
into; only what its first and last block have beyond it is read again, up to two blocks. What was
right once is not hashed again: neither in later sweeps nor for targets that come later.
"""

import hashlib

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint, TensorSpan
from headrace.model.manifest import (
    BLOCK_BYTES,
    FILE_NAME,
    Manifest,
    different,
    num_blocks,
    read_bytes,
)


class Integrity:
    """Of one checkpoint; may be used on many threads at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load the manifest, and compare all but the weights.

        Raises:
            CheckpointCorrupt: It is damaged, or files or tensors are missing, new or of another
                size.
        """
        self._manifest = Manifest.load(checkpoint.directory)
        self._checked: set[tuple[str, int, int]] = set()
        """Name, offset and size of the pieces that were right."""
        mismatches = [] if self._manifest is None else self._manifest.mismatches(checkpoint)
        if mismatches:
            raise CheckpointCorrupt(_refusal(mismatches[0], num_more=len(mismatches) - 1))

    def is_checked(self, span: TensorSpan, offset_bytes: int, num_bytes: int) -> bool:
        """Whether there is nothing more to check about a piece.

        Args:
            span: The tensor.
            offset_bytes: Of the piece, from the start of the tensor.
            num_bytes: Of the piece.
        """
        return self._manifest is None or (span.name, offset_bytes, num_bytes) in self._checked

    def check(self, span: TensorSpan, offset_bytes: int, data: memoryview) -> None:
        """Check a piece that was read, unless it was right before.

        Args:
            span: The tensor.
            offset_bytes: Of the piece, from the start of the tensor.
            data: [bytes] the piece.

        Raises:
            CheckpointCorrupt: The tensor is not what it was when the manifest was written.
            PeerUnavailable: The rest of a block cannot be read.
        """
        if self._manifest is None or self.is_checked(span, offset_bytes, len(data)):
            return
        record = self._manifest.tensors[span.name]
        for block in _blocks(offset_bytes, len(data)):
            if _digest(span, block, offset_bytes, data) != record.digest(block):
                raise CheckpointCorrupt(_refusal(different(span)))
        self._checked.add((span.name, offset_bytes, len(data)))

    def check_around(self, span: TensorSpan, offset_bytes: int, num_bytes: int) -> None:
        """Check the whole blocks that a small piece lies in, which many others lie in too.

        Args and errors as for `check`.
        """
        for block in _blocks(offset_bytes, num_bytes):
            begin, end = _bounds(span, block)
            if not self.is_checked(span, begin, end - begin):
                self.check(span, begin, memoryview(read_bytes(span, begin, end)))


def _blocks(offset_bytes: int, num_bytes: int) -> range:
    """Those that a piece has bytes of."""
    return range(offset_bytes // BLOCK_BYTES, num_blocks(offset_bytes + num_bytes))


def _bounds(span: TensorSpan, block: int) -> tuple[int, int]:
    """Where a block begins and ends, from the start of the tensor."""
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, span.num_bytes)


def _digest(span: TensorSpan, block: int, offset_bytes: int, data: memoryview) -> bytes:
    """Of a block: the piece's bytes as they are in memory, the others as they are in the file."""
    block_begin, block_end = _bounds(span, block)
    begin = max(block_begin, offset_bytes)
    end = min(block_end, offset_bytes + len(data))
    digest = hashlib.sha256(read_bytes(span, block_begin, begin))
    digest.update(data[begin - offset_bytes : end - offset_bytes])
    digest.update(read_bytes(span, end, block_end))
    return digest.digest()


def _refusal(mismatch: str, *, num_more: int = 0) -> str:
    more = f" (and {num_more} more)" if num_more else ""
    return (
        f"{mismatch}: not what {FILE_NAME} says{more}; fetch it again, or, if it was changed on "
        "purpose, run `headrace models verify --update`"
    )
