"""A 70B-shaped model in float8, random, streamed in two gigabytes of memory.

    python benchmarks/large_float8.py DIR [--layers 80] [--memory 2150M] [--rounds 3]

Makes the model in DIR unless it is there (70 GB for 80 layers; fewer layers where the disk has no
room), then runs `headrace bench stream` on it: sweeps of 8 tokens against fio's best figure in the
same run, under one memory cap for target and streamer together.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace.catalog.resolve import model_path

HIDDEN, MLP, HEADS, KV_HEADS, VOCABULARY = 8192, 28_672, 64, 8, 128_256
_KV_WIDTH = HIDDEN // HEADS * KV_HEADS
_LAYERS_A_SHARD = 4
_POOL_ELEMENTS = 256 << 20
"""Random numbers to cut matrices from, each at another place."""
_STANDARD_DEVIATION = 0.02
_MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV_WIDTH, HIDDEN),
    "self_attn.v_proj": (_KV_WIDTH, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
    "ignore": [],
}


def config(num_layers: int) -> dict[str, object]:
    """What config.json says."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "quantization_config": _QUANTIZATION,
    }


class Pool:
    """Random float8 numbers of standard deviation 1."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        parts = [
            torch.randn(_POOL_ELEMENTS // 16, generator=generator).to(torch.float8_e4m3fn)
            for _ in range(16)
        ]
        self._numbers = torch.cat([part.view(torch.uint8) for part in parts])
        self._generator = generator

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """So many bytes from anywhere in the pool, in parts."""
        while num_bytes:
            size = min(num_bytes, _POOL_ELEMENTS // 2)
            begin = int(torch.randint(_POOL_ELEMENTS - size + 1, (), generator=self._generator))
            yield self._numbers[begin : begin + size].numpy().data
            num_bytes -= size


def scaled(name: str, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A float8 matrix and its scales: name to type and shape."""
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale": ("BF16", (rows, 1)),
    }


def layer_tensors(layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to type and shape."""
    prefix = f"model.layers.{layer}."
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (rows, columns) in _MATRICES.items():
        tensors |= scaled(prefix + name, rows, columns)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{norm}.weight"] = ("BF16", (HIDDEN,))
    return tensors


def shards(num_layers: int) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """File name to tensors."""
    files = {
        "ends.safetensors": {
            "model.embed_tokens.weight": ("BF16", (VOCABULARY, HIDDEN)),
            "model.norm.weight": ("BF16", (HIDDEN,)),
            **scaled("lm_head", VOCABULARY, HIDDEN),
        }
    }
    for begin in range(0, num_layers, _LAYERS_A_SHARD):
        layers = range(begin, min(begin + _LAYERS_A_SHARD, num_layers))
        tensors = {name: t for layer in layers for name, t in layer_tensors(layer).items()}
        files[f"layers-{begin:02}.safetensors"] = tensors
    return files


def content(name: str, dtype: str, shape: tuple[int, ...], pool: Pool) -> Iterator[memoryview]:
    """The bytes of one tensor."""
    if dtype == "F8_E4M3":
        yield from pool.take(shape[0] * shape[1])
        return
    if name.endswith("norm.weight"):
        yield _bytes_of(torch.ones(shape))
    elif name.endswith("_scale"):
        yield _bytes_of(torch.full(shape, _STANDARD_DEVIATION))
    else:
        for begin in range(0, shape[0], 1024):
            rows = min(1024, shape[0] - begin)
            yield _bytes_of(_STANDARD_DEVIATION * torch.randn(rows, shape[1]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.to(torch.bfloat16).view(torch.uint8).numpy().data


def write_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], pool: Pool) -> None:
    """One safetensors file."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        elements = 1
        for size in shape:
            elements *= size
        begin, end = end, end + elements * (1 if dtype == "F8_E4M3" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as the format's own writer does
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (dtype, shape) in tensors.items():
            for part in content(name, dtype, shape, pool):
                file.write(part)
        if file.tell() != 8 + len(encoded) + end:
            raise AssertionError(f"{path} has another size than its header says")


def make(directory: Path, num_layers: int) -> None:
    """Write the model; config.json comes last, so that half a model is none."""
    directory.mkdir(parents=True, exist_ok=True)
    files, pool = shards(num_layers), Pool()
    for index, (file, tensors) in enumerate(files.items(), start=1):
        print(f"writing {file}, {index} of {len(files)}", flush=True)
        write_shard(directory / file, tensors, pool)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("demo") / file, directory / file)
    (directory / "config.json").write_text(json.dumps(config(num_layers)))


def main() -> None:
    """Make the model if need be, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--memory", default="2150M")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not (arguments.directory / "config.json").is_file():
        make(arguments.directory, arguments.layers)
    command = [
        *(sys.executable, "-m", "headrace.cli", "bench", "stream"),
        *("--target", str(arguments.directory), "--memory", arguments.memory),
        *("--tokens", "8", "--rounds", str(arguments.rounds), "--json"),
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
