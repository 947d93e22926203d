"""A draft made from its target by leaving out decoder layers. Copies bytes; needs no torch."""

import json
import re
import shutil
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from headrace.model import manifest

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


def drop_layers(source: Path, directory: Path, dropped: Collection[int]) -> None:
    """Write a model without some of its decoder layers; those after them move up.

    Args:
        source: A Hugging Face directory with one model.safetensors.
        directory: An existing, empty directory.
        dropped: Numbers of the decoder layers to leave out.
    """
    config = json.loads((source / _CONFIG).read_text())
    num_layers = config["num_hidden_layers"]
    kept = [layer for layer in range(num_layers) if layer not in dropped]
    for path in source.iterdir():
        if path.name not in (_WEIGHTS, _CONFIG, manifest.FILE_NAME):
            shutil.copy(path, directory)
    (directory / _CONFIG).write_text(json.dumps(_shorten(config, kept), indent=2) + "\n")
    _copy_tensors(source / _WEIGHTS, directory / _WEIGHTS, kept)


def _shorten(config: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """The config for the kept layers; lists with one entry a layer, as layer_types, shorten too."""
    num_layers = config["num_hidden_layers"]
    shortened = {
        key: [value[layer] for layer in kept]
        if isinstance(value, list) and len(value) == num_layers
        else value
        for key, value in config.items()
    }
    return {**shortened, "num_hidden_layers": len(kept)}


def _copy_tensors(source: Path, destination: Path, kept: list[int]) -> None:
    """Safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    with source.open("rb") as read, destination.open("wb") as write:
        (header_bytes,) = struct.unpack("<Q", read.read(8))
        header = json.loads(read.read(header_bytes))
        data_start = 8 + header_bytes
        new_header: dict[str, Any] = {"__metadata__": header.pop("__metadata__", {})}
        spans: list[tuple[int, int]] = []
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            new_name = _renumber(name, kept)
            if new_name is None:
                continue
            first, last = entry["data_offsets"]
            new_header[new_name] = {**entry, "data_offsets": [end, end + last - first]}
            spans.append((data_start + first, last - first))
            end += last - first
        encoded = json.dumps(new_header).encode()
        encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
        write.write(struct.pack("<Q", len(encoded)) + encoded)
        for offset, num_bytes in spans:
            read.seek(offset)
            _copy(read, write, num_bytes)


def _renumber(name: str, kept: list[int]) -> str | None:
    """The tensor's name in the smaller model, or None when its layer is left out."""
    match = _LAYER.search(name)
    if match is None:
        return name
    layer = int(match.group())
    return _LAYER.sub(str(kept.index(layer)), name, count=1) if layer in kept else None


def _copy(read: BinaryIO, write: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0:
        chunk = read.read(min(num_bytes, 1 << 20))
        write.write(chunk)
        num_bytes -= len(chunk)
