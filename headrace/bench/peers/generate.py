"""Lets a library generate with a model that stays on disk, and prints what it took as JSON.

    python generate.py LIBRARY MODEL_DIR WORK_DIR MEMORY_BYTES NUM_TOKENS NUM_REQUESTS

Runs in the library's own virtual environment: imports nothing of Headrace.
"""

import json
import resource
import sys
import time
from importlib import import_module
from typing import Any

_PROMPT_TOKEN = 1
_WEIGHTS_SHARE = 0.3
"""Of the memory: what accelerate may keep of the weights; torch and activations need the rest."""


def load_accelerate(model_dir: str, work_dir: str, memory_bytes: int) -> Any:
    """Layers that do not fit are read from their files whenever they are used."""
    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype="auto",
        device_map="auto",
        max_memory={"cpu": int(_WEIGHTS_SHARE * memory_bytes)},
        offload_folder=work_dir,
    )
    if "disk" not in model.hf_device_map.values():
        sys.exit("the model fits the memory, so nothing of it is offloaded")
    return model


def load_airllm(model_dir: str, work_dir: str, memory_bytes: int) -> Any:
    """Writes one file a layer into work_dir at its first run."""
    airllm = import_module("airllm")
    return airllm.AutoModel.from_pretrained(
        model_dir, device="cpu", layer_shards_saving_path=work_dir
    )


def seconds_per_step(model: Any, num_tokens: int, num_requests: int) -> float:
    """From the first new token to the last, all requests in one batch."""
    torch = import_module("torch")
    times: list[float] = []

    def note(input_ids: Any, scores: Any) -> Any:
        times.append(time.perf_counter())
        return scores

    model.generate(
        torch.full((num_requests, 2), _PROMPT_TOKEN),
        attention_mask=torch.ones(num_requests, 2, dtype=torch.int64),
        max_new_tokens=num_tokens + 1,
        min_new_tokens=num_tokens + 1,
        do_sample=False,
        use_cache=True,
        logits_processor=[note],
    )
    return (times[-1] - times[0]) / (len(times) - 1)


_LOADERS = {"accelerate": load_accelerate, "airllm": load_airllm}


def main() -> None:
    """Load, generate for one request and for many, print."""
    library, model_dir, work_dir = sys.argv[1:4]
    memory_bytes, num_tokens, num_requests = map(int, sys.argv[4:])
    model = _LOADERS[library](model_dir, work_dir, memory_bytes)
    alone_s = seconds_per_step(model, num_tokens, 1)
    together_s = seconds_per_step(model, num_tokens, num_requests)
    figures = {
        "seconds_per_token": alone_s,
        "tokens_per_s_16": num_requests / together_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    sys.stdout.write(f"\n{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
