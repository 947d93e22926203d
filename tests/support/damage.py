"""Damage to a checkpoint that neither sizes nor times show."""

import os
from pathlib import Path

from headrace.model.checkpoint import Checkpoint


def flip_bit(directory: Path, tensor_name: str, offset_bytes: int) -> None:
    """Change one bit of a tensor, that many bytes from its start; the file's times stay."""
    span = Checkpoint.open(directory).tensors[tensor_name]
    times = span.file.stat()
    with span.file.open("r+b") as file:
        file.seek(span.offset_bytes + offset_bytes)
        (byte,) = file.read(1)
        file.seek(span.offset_bytes + offset_bytes)
        file.write(bytes([byte ^ 1]))
    os.utime(span.file, ns=(times.st_atime_ns, times.st_mtime_ns))
