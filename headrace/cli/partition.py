"""How a stack's processes share memory: the envelope of its models, as a process of its own tells.

The launcher lives as long as the stack and stays small: working out an envelope imports torch.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from headrace.errors import ConfigError
from headrace.sizes import parse_bytes

Weights = Literal["auto", "streamed", "resident"]

_AUTO_SHARE = 0.8
"""Of the memory that is available."""
_CGROUP_FILES = (  # version 2, version 1: limit, usage
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What each process is told to allocate."""

    is_streamed: bool
    num_slots: int
    slot_bytes: int
    """Size to aim at for a unit."""
    resident_bytes: int
    """Of streamed weights, how much stays in memory."""
    kv_tokens: int
    max_sweep_tokens: int


def find_partition(
    target_dir: Path, draft_dir: Path | None, *, memory: str, weights: Weights
) -> Partition:
    """Divide a budget.

    Args:
        target_dir: Model directory.
        draft_dir: Model directory, or None for plain decoding.
        memory: A size, or auto.
        weights: auto: streamed only if they do not fit.

    Raises:
        ConfigError: The budget is too small, or a model cannot be served.
    """
    budget_bytes = available_budget() if memory == "auto" else parse_bytes(memory)
    command = [
        *(sys.executable, "-m", "headrace.cli", "envelope", "--json"),
        *("--target", str(target_dir), "--draft", str(draft_dir or "none")),
        *("--budget", str(budget_bytes), "--weights", weights),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ConfigError(answer.stderr.strip().removeprefix("headrace: "))
    envelope = json.loads(answer.stdout)
    return Partition(
        is_streamed=envelope["is_streamed"],
        num_slots=envelope["num_slots"],
        slot_bytes=envelope["unit_bytes"],
        resident_bytes=envelope["resident_unit_bytes"],
        kv_tokens=envelope["kv_tokens"],
        max_sweep_tokens=envelope["max_sweep_tokens"],
    )


def available_budget() -> int:
    """What auto stands for, in bytes."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in _CGROUP_FILES:
        try:
            limit = Path(limit_file).read_text()
            usage = Path(usage_file).read_text()
        except OSError:
            continue
        if limit.strip().isdecimal():  # "max" is none
            available = min(available, int(limit) - int(usage))
    return max(1, int(_AUTO_SHARE * available))
