"""Which processes a stack has, in which order they start, and how each is told about the others.

Pure but for the look-up of the Redis server: it starts nothing.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from headrace.cli.partition import Partition
from headrace.cli.readiness import GrpcProbe, HttpProbe, Probe, RedisProbe
from headrace.cli.redis_server import redis_command
from headrace.cli.runtime_settings import RUNTIME_SETTINGS

STREAMER = "streamer"
GATEWAY_DRAIN_S = 30
"""How long a stopping gateway lets live requests finish, unless HEADRACE_DRAIN_S says otherwise."""

_STOP_GRACE_S = 10.0
_WIRED = ("HEADRACE_STREAMER_ADDRESS", "HEADRACE_DRAFT_ADDRESS", "HEADRACE_DRAFT_DIR")
"""Absent when the stack has no such process, whatever the user's environment says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What to start."""

    target_dir: Path
    draft_dir: Path | None
    """None: plain decoding."""
    gamma: int
    """Draft tokens a step, unless a request says otherwise."""
    host: str
    http_port: int
    grpc_port: int
    partition: Partition
    """Of the memory; where it streams nothing, there is no streamer."""

    @property
    def base_url(self) -> str:
        """Where this machine reaches the gateway's HTTP API."""
        return f"http://{_reachable(self.host)}:{self.http_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process: how to start it and how to see that it serves."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    probe: Probe
    stop_grace_s: float = _STOP_GRACE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateDirectories:
    """Directories that live as long as the stack and that only its user can enter."""

    run: Path
    """Sockets, logs, Redis data."""
    shared_memory: Path
    """The streamer's slots."""

    def socket(self, name: str) -> Path:
        """The unix socket of one process."""
        return self.run / f"{name}.sock"


def stages(
    config: StackConfig, directories: PrivateDirectories, environ: Mapping[str, str]
) -> list[list[ProcessSpec]]:
    """The stack's processes: those of one stage start together, once the stage before serves.

    Args:
        config: What to start.
        directories: Where sockets and shared memory go.
        environ: The user's environment; its HEADRACE_* settings reach every process.

    Raises:
        ConfigError: No Redis server can be found.
    """
    environment = _shared_environment(config, directories, environ)
    storage, models = [], [_service("target", environment, directories)]
    if not environ.get("REDIS_URL"):
        storage.append(_redis(environment, directories))
    if config.partition.is_streamed:
        storage.append(_service(STREAMER, environment, directories))
    if config.draft_dir is not None:
        models.append(_service("draft", environment, directories))
    gateway = ProcessSpec(
        name="gateway",
        command=(sys.executable, "-m", "gateway"),
        environment=environment,
        probe=HttpProbe(url=f"{config.base_url}/health"),
        stop_grace_s=float(environment["HEADRACE_DRAIN_S"]) + _STOP_GRACE_S,
    )
    return [stage for stage in (storage, models, [gateway]) if stage]


def _service(
    name: str, environment: Mapping[str, str], directories: PrivateDirectories
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-m", f"services.{name}"),
        environment=environment,
        probe=GrpcProbe(name=name, socket=directories.socket(name)),
    )


def _redis(environment: Mapping[str, str], directories: PrivateDirectories) -> ProcessSpec:
    socket = directories.socket("redis")
    return ProcessSpec(
        name="redis",
        command=redis_command(directories.run, socket),
        environment=environment,
        probe=RedisProbe(socket=socket),
    )


def _shared_environment(
    config: StackConfig, directories: PrivateDirectories, environ: Mapping[str, str]
) -> dict[str, str]:
    """One table for all processes; each reads what it needs."""
    num_threads = (
        environ.get("HEADRACE_THREADS") or environ.get("OMP_NUM_THREADS") or str(_num_cores())
    )
    environment = {
        "HEADRACE_DRAIN_S": str(GATEWAY_DRAIN_S),
        "HEADRACE_THREADS": num_threads,
        **_memory_settings(config.partition),
        "REDIS_URL": f"unix://{quote(str(directories.socket('redis')))}",
        **RUNTIME_SETTINGS,
        **{name: value for name, value in environ.items() if value and name not in _WIRED},
        "HEADRACE_TARGET_DIR": str(config.target_dir),
        "HEADRACE_TARGET_ADDRESS": f"unix:{directories.socket('target')}",
        "HEADRACE_HTTP_ADDRESS": f"{_bracketed(config.host)}:{config.http_port}",
        "HEADRACE_GRPC_ADDRESS": f"{_bracketed(config.host)}:{config.grpc_port}",
        "HEADRACE_GAMMA": str(config.gamma),
        "HEADRACE_SHM_DIR": str(directories.shared_memory),
        "OMP_NUM_THREADS": num_threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # every model is a local directory by now
    }
    if config.partition.is_streamed:
        environment["HEADRACE_STREAMER_ADDRESS"] = f"unix:{directories.socket(STREAMER)}"
    if config.draft_dir is not None:
        environment["HEADRACE_DRAFT_DIR"] = str(config.draft_dir)
        environment["HEADRACE_DRAFT_ADDRESS"] = f"unix:{directories.socket('draft')}"
    return environment


def _memory_settings(partition: Partition) -> dict[str, str]:
    return {
        "HEADRACE_SLOTS": str(max(1, partition.num_slots)),
        "HEADRACE_SLOT_BYTES": str(partition.slot_bytes),
        "HEADRACE_RESIDENT_BYTES": str(partition.resident_bytes),
        "HEADRACE_TARGET_KV_TOKENS": str(partition.kv_tokens),
        "HEADRACE_DRAFT_KV_TOKENS": str(partition.kv_tokens),
        "HEADRACE_MAX_SWEEP_TOKENS": str(partition.max_sweep_tokens),
    }


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reachable(host: str) -> str:
    """Where this machine reaches an interface, in the form that URLs take."""
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return _bracketed(loopback.get(host, host))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
