"""Where every tensor of a Hugging Face directory lies in its safetensors files.

The index decides what a tensor is; headers are checked against it and against the file sizes before
anything is read. Reads no weights and knows nothing of torch. Format:
https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the tensors).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointCorrupt, ConfigError

_MAX_HEADER_BYTES = 100 << 20
_ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpan:
    """The bytes of one tensor."""

    name: str
    file: Path
    offset_bytes: int
    """From the start of the file."""
    num_bytes: int
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory whose tensors are all where its headers say."""

    name: str
    directory: Path
    tensors: Mapping[str, TensorSpan]

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Read and check the headers.

        Args:
            directory: config.json beside model.safetensors, or beside shards and their index.

        Raises:
            ConfigError: It is no such directory.
            CheckpointCorrupt: Files are missing or damaged; the message names them.
        """
        if not _has_config(directory):
            raise ConfigError(
                f"{directory} has no config.json that describes a model: "
                "give a Hugging Face model directory"
            )
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            tensors = _open_sharded(directory, _weight_map(index))
        elif (directory / "model.safetensors").is_file():
            tensors = _read_header(directory / "model.safetensors")
        else:
            raise ConfigError(_why_not(directory))
        return cls(name=directory.resolve().name, directory=directory, tensors=tensors)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(span.num_bytes for span in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """Every file that holds a tensor, sorted."""
        return sorted({span.file for span in self.tensors.values()})

    def fingerprint(self) -> str:
        """Tells two checkpoints apart, or one from its later self; reads no weights.

        A hash of where every tensor lies, and of each file's size and time of change.
        """
        digest = hashlib.sha256()
        for file in self.files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for span in sorted(self.tensors.values(), key=lambda span: span.name):
            place = (span.name, span.file.name, span.offset_bytes, span.dtype, span.shape)
            digest.update(f"{place}\n".encode())
        return digest.hexdigest()


def _has_config(directory: Path) -> bool:
    try:
        return isinstance(json.loads((directory / "config.json").read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _why_not(directory: Path) -> str:
    suffixes = {path.suffix for path in directory.iterdir()}
    if suffixes & {".bin", ".pt", ".pth"}:
        return (
            f"{directory} holds pickled weights, which are never opened: convert them to "
            "safetensors with the library that made them (save_pretrained)"
        )
    if ".gguf" in suffixes:
        return f"{directory} holds GGUF, which cannot be streamed yet: give a safetensors directory"
    return f"{directory} holds no safetensors file: give a Hugging Face model directory"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointCorrupt(f"{index.name} is not a safetensors index") from None


def _open_sharded(directory: Path, weight_map: Mapping[str, str]) -> dict[str, TensorSpan]:
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise CheckpointCorrupt(f"the index names files outside the directory: {_some(outside)}")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointCorrupt(f"the index names shards that are not here: {_some(missing)}")
    headers = {shard: _read_header(directory / shard) for shard in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise CheckpointCorrupt(f"the index names tensors that their shards lack: {_some(absent)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _read_header(file: Path) -> dict[str, TensorSpan]:
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if file_bytes < 8 or not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise CheckpointCorrupt(f"{file.name} is not a complete safetensors file")
        try:
            header = json.loads(stream.read(header_bytes))
        except (ValueError, RecursionError):
            raise CheckpointCorrupt(f"{file.name} has a damaged header") from None
    if not isinstance(header, dict):
        raise CheckpointCorrupt(f"{file.name} has a damaged header")
    base = 8 + header_bytes
    spans = [
        _span(file, name, entry, base) for name, entry in header.items() if name != "__metadata__"
    ]
    _check_layout(file, spans, base, file_bytes)
    return {span.name: span for span in spans}


def _span(file: Path, name: str, entry: Any, base: int) -> TensorSpan:
    try:
        begin, end = map(int, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        element_bytes = _ELEMENT_BYTES[entry["dtype"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointCorrupt(f"{file.name}: the header of tensor {name} is damaged") from None
    if begin < 0 or min(shape, default=0) < 0 or end - begin != prod(shape) * element_bytes:
        raise CheckpointCorrupt(f"{file.name}: tensor {name} has another size than its shape")
    return TensorSpan(
        name=name,
        file=file,
        offset_bytes=base + begin,
        num_bytes=end - begin,
        dtype=entry["dtype"],
        shape=shape,
    )


def _check_layout(file: Path, spans: list[TensorSpan], base: int, file_bytes: int) -> None:
    end = base
    for span in sorted(spans, key=lambda span: (span.offset_bytes, span.num_bytes)):
        if span.offset_bytes < end:
            raise CheckpointCorrupt(f"{file.name}: tensor {span.name} overlaps another")
        end = span.offset_bytes + span.num_bytes
        if end > file_bytes:
            raise CheckpointCorrupt(
                f"{file.name} is truncated: tensor {span.name} ends at byte {end} of {file_bytes}"
            )
