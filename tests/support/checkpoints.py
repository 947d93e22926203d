"""Checkpoints of random bytes, written by hand so that they can be wrong in any way."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


def random_bytes(num_bytes: int, *, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def header_of(tensors: Mapping[str, bytes]) -> dict[str, Any]:
    """One entry a tensor, [N] bf16, in the order given and without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, data in tensors.items():
        offsets = [end, end + len(data)]
        header[name] = {"dtype": "BF16", "shape": [len(data) // 2], "data_offsets": offsets}
        end += len(data)
    return header


def write_file(file: Path, header: object, data: bytes) -> None:
    """A safetensors file whose header may say anything; tensors begin at even places."""
    encoded = json.dumps(header).encode()
    encoded += b" " * (len(encoded) % 2)
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def write_tensors(file: Path, tensors: Mapping[str, bytes]) -> None:
    """A safetensors file as it should be."""
    write_file(file, header_of(tensors), b"".join(tensors.values()))


def write_index(directory: Path, weight_map: Mapping[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))


def write_config(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')


def write_single(directory: Path, tensors: Mapping[str, bytes]) -> Path:
    """A directory with one file and no index."""
    write_config(directory)
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def write_sharded(directory: Path, shards: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A directory with the shards by file name, and their index."""
    write_config(directory)
    for shard, tensors in shards.items():
        write_tensors(directory / shard, tensors)
    write_index(directory, {name: shard for shard, tensors in shards.items() for name in tensors})
    return directory


def layer_tensors(
    sizes_bytes: Sequence[Sequence[int]], *, num_resident_bytes: int = 30
) -> dict[str, bytes]:
    """[L][tensors of a layer] random tensors of those sizes, with an embedding before them."""
    tensors = {"model.embed_tokens.weight": random_bytes(num_resident_bytes, seed=1_000_000)}
    for layer, sizes in enumerate(sizes_bytes):
        for index, size in enumerate(sizes):
            name = f"model.layers.{layer}.part{index}.weight"
            tensors[name] = random_bytes(size, seed=1000 * layer + index)
    return tensors
