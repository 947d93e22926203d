"""A large model that computes what a small one does: to measure with, where no other is at hand.

Every MLP gets more neurons, with random weights on their way in and zeros on their way out: they
are read and computed as any other and add nothing, so that the logits stay what they were but for
rounding. Works tensor by tensor, in little memory; needs no torch.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.catalog.cache import complete_directory
from headrace.errors import CheckpointCorrupt, ConfigError
from headrace.model import manifest
from headrace.model.checkpoint import Checkpoint, TensorSpan
from headrace.sizes import format_bytes

_PROJECTION = re.compile(r"(?:^|\.)layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj)\.(weight|bias)$")
_MLP = re.compile(r"(?:^|\.)layers\.\d+\.(?:mlp|block_sparse_moe|feed_forward)\.")
_CONFIG = "config.json"
_GRAIN = 64
"""Neurons are added in multiples of this, as kernels like it."""
_NOISE = np.float32(0.02)
"""Standard deviation of the random weights: about that of trained ones."""
_BLOCK_BYTES = 16 << 20


def widen(source: Path, directory: Path, *, num_bytes: int) -> None:
    """Write a model of about num_bytes that computes what another does.

    Args:
        source: A Hugging Face directory with safetensors.
        directory: The new one; it gets its name when all of it is written.
        num_bytes: Of the new weights, met to the nearest multiple of 64 neurons a layer.

    Raises:
        ConfigError: The model has no MLP that can be widened, or is as large already; the directory
            exists or there is no room for it.
        CheckpointCorrupt: The model is damaged.
    """
    checkpoint = Checkpoint.open(source)
    config = json.loads((source / _CONFIG).read_text())
    _require_plain_mlp(config, checkpoint.tensors)
    num_added = _num_added(checkpoint, config["intermediate_size"], num_bytes)
    # As they lie in the files, so that what is used together stays together.
    spans = sorted(checkpoint.tensors.values(), key=lambda span: (span.file, span.offset_bytes))
    tensors = [_Widened.of(span, num_added) for span in spans]
    _require_room(directory, sum(tensor.num_bytes for tensor in tensors))
    with complete_directory(directory) as partial:
        for path in source.iterdir():
            is_other = path.name in (_CONFIG, manifest.FILE_NAME) or ".safetensors" in path.name
            if path.is_file() and not is_other:
                shutil.copy(path, partial)
        wide = {**config, "intermediate_size": config["intermediate_size"] + num_added}
        (partial / _CONFIG).write_text(json.dumps(wide, indent=2) + "\n")
        _write(partial / "model.safetensors", tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Widened:
    """A tensor of the old model, and what is put on it."""

    span: TensorSpan
    num_rows: int = 0
    """Random ones, at the end."""
    num_columns: int = 0
    """Zeros, at the end of each row."""

    @classmethod
    def of(cls, span: TensorSpan, num_neurons: int) -> "_Widened":
        """What becomes of a tensor when its layer's MLP gets more neurons."""
        match _projection(span.name):
            case "down_proj", "weight":
                return cls(span=span, num_columns=num_neurons)
            case (("gate_proj" | "up_proj"), _):
                return cls(span=span, num_rows=num_neurons)
        return cls(span=span)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the new tensor."""
        if self.num_columns:
            rows, columns = self.span.shape
            return (rows, columns + self.num_columns)
        if self.num_rows:
            return (self.span.shape[0] + self.num_rows, *self.span.shape[1:])
        return self.span.shape

    @property
    def num_bytes(self) -> int:
        """Of the new tensor."""
        num_elements = prod(self.span.shape)
        return self.span.num_bytes * prod(self.shape) // num_elements if num_elements else 0

    def blocks(self, noise: np.random.Generator) -> Iterator[bytes]:
        """The new tensor's bytes."""
        with self.span.file.open("rb") as file:
            file.seek(self.span.offset_bytes)
            if self.num_columns:
                yield from self._with_columns(file)
            else:
                yield from _pieces(file, self.span, self.span.num_bytes)
        num_left = self.num_rows * prod(self.span.shape[1:])
        while num_left:
            num_elements = min(num_left, _BLOCK_BYTES // 4)
            values = noise.standard_normal(num_elements, dtype=np.float32) * _NOISE
            yield _ENCODERS[self.span.dtype](values)
            num_left -= num_elements

    def _with_columns(self, file: BinaryIO) -> Iterator[bytes]:
        rows, columns = self.span.shape
        row_bytes = self.span.num_bytes // rows
        zeros = bytes(row_bytes * self.num_columns // columns)
        for _ in range(rows):
            yield from _pieces(file, self.span, row_bytes)
            yield zeros


def _projection(name: str) -> tuple[str, str] | None:
    """(projection, weight or bias) of an MLP's tensor, None for any other."""
    match = _PROJECTION.search(name)
    return (match[1], match[2]) if match else None


def _pieces(file: BinaryIO, span: TensorSpan, num_bytes: int) -> Iterator[bytes]:
    """The file's next bytes."""
    while num_bytes:
        piece = file.read(min(num_bytes, _BLOCK_BYTES))
        if not piece:
            raise CheckpointCorrupt(f"{span.file.name} ends before tensor {span.name} does")
        yield piece
        num_bytes -= len(piece)


def _encode_bf16(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


_ENCODERS: dict[str, Callable[[NDArray[np.float32]], bytes]] = {
    "BF16": _encode_bf16,
    "F16": lambda values: values.astype("<f2").tobytes(),
    "F32": lambda values: values.astype("<f4").tobytes(),
}


def _require_plain_mlp(config: Mapping[str, Any], tensors: Mapping[str, TensorSpan]) -> None:
    """Refuse a model whose layers are not all of gate, up and down projections."""
    projections = [name for name in tensors if _projection(name)]
    matrices = [name for name in projections if name.endswith(".weight")]
    is_plain = (
        isinstance(config.get("intermediate_size"), int)
        and len(matrices) == 3 * config.get("num_hidden_layers", 0) > 0
        and sum(_MLP.search(name) is not None for name in tensors) == len(projections)
    )
    if not is_plain:
        raise ConfigError(
            f"a {config.get('model_type', 'nameless')} model cannot be widened: give one whose "
            "layers all have an MLP of gate_proj, up_proj and down_proj, as Llama and Qwen 3 do"
        )
    others = {tensors[name].dtype for name in projections} - _ENCODERS.keys()
    if others:
        raise ConfigError(
            f"weights of type {min(others)} cannot be widened: give a model in "
            f"{', '.join(_ENCODERS)}"
        )


def _num_added(checkpoint: Checkpoint, num_neurons: int, num_bytes: int) -> int:
    """How many neurons each layer needs more."""
    by_neuron = (
        span.num_bytes
        for name, span in checkpoint.tensors.items()
        if _projection(name) not in (None, ("down_proj", "bias"))
    )
    neuron_bytes = sum(by_neuron) / num_neurons
    num_added = round((num_bytes - checkpoint.num_bytes) / neuron_bytes / _GRAIN) * _GRAIN
    if num_added <= 0:
        raise ConfigError(
            f"{checkpoint.name} has {format_bytes(checkpoint.num_bytes)} already: ask for more "
            f"than {format_bytes(num_bytes)}"
        )
    return num_added


def _require_room(directory: Path, num_bytes: int) -> None:
    if directory.exists():
        raise ConfigError(f"{directory} exists already: remove it or give another --output")
    if not directory.parent.is_dir():
        raise ConfigError(f"there is no directory {directory.parent}: make it first")
    free_bytes = shutil.disk_usage(directory.parent).free
    if free_bytes < num_bytes:
        raise ConfigError(
            f"{format_bytes(num_bytes)} are needed in {directory.parent} and "
            f"{format_bytes(free_bytes)} are free: free some, or give an --output on a larger disk"
        )


def _write(file: Path, tensors: Sequence[_Widened]) -> None:
    """Safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.span.name] = {
            "dtype": tensor.span.dtype,
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    noise = np.random.default_rng(0)
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            for block in tensor.blocks(noise):
                output.write(block)
