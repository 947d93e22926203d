"""What the disk itself does: fio's direct, sequential reads of the model's own file."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

_MIB = 1 << 20
_RUN_S = 1.5
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How fio reads."""

    block_bytes: int
    depth: int
    """Reads in flight."""


PATTERNS = (
    Pattern(block_bytes=_MIB, depth=8),
    Pattern(block_bytes=_MIB, depth=32),
    Pattern(block_bytes=4 * _MIB, depth=8),
    Pattern(block_bytes=4 * _MIB, depth=16),
)
"""The disk's figure is that of the best."""


def require_fio() -> str:
    """The path of fio.

    Raises:
        ConfigError: It is not installed.
    """
    path = shutil.which("fio")
    if path is None:
        raise ConfigError("fio is not installed: get it with `apt-get install fio` or the like")
    return path


def disk_gb_per_s(file: Path) -> float:
    """The best of all patterns, one after the other.

    Raises:
        ConfigError: fio is not installed or cannot read the file.
    """
    return max(_gb_per_s(require_fio(), file, pattern) for pattern in PATTERNS)


def _gb_per_s(fio: str, file: Path, pattern: Pattern) -> float:
    command = [
        fio,
        "--name=disk",
        "--filename=" + str(file).replace("\\", "\\\\").replace(":", "\\:"),
        *("--readonly", "--rw=read", "--direct=1", "--ioengine=libaio"),
        *(f"--bs={pattern.block_bytes}", f"--iodepth={pattern.depth}"),
        *("--time_based", f"--runtime={_RUN_S}", "--output-format=json"),
    ]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if answer.returncode != 0:
        reason = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(
            f"fio cannot read {file.name} directly ({reason[0]}): put the model on a local disk"
        )
    read = json.loads(answer.stdout)["jobs"][0]["read"]
    return float(read["io_bytes"] / read["runtime"] / 1e6)  # runtime is in ms
