"""The whole stack as a user starts it: `headrace serve`, every process real."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """Where a stack answers."""

    base_url: str
    grpc_address: str
    pid: int


@contextmanager
def running_stack(
    target: Path,
    draft: Path | None,
    log: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningStack]:
    """Start a stack that streams its weights, on free ports, and stop it with SIGTERM.

    Args:
        target: Model directory.
        draft: Model directory, or None for plain decoding.
        log: Where its output goes.
        arguments: More options of `headrace serve`.
        environment: Set beside the test's own.
    """
    http_port, grpc_port = _free_port(), _free_port()
    command = [
        str(Path(sys.executable).with_name("headrace")),
        *("serve", "--target", str(target)),
        *("--draft", "none" if draft is None else str(draft)),
        *("--weights", "streamed", "--memory", "4G"),
        *("--http-port", str(http_port), "--grpc-port", str(grpc_port)),
        *arguments,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    stack = RunningStack(
        base_url=f"http://127.0.0.1:{http_port}",
        grpc_address=f"127.0.0.1:{grpc_port}",
        pid=process.pid,
    )
    try:
        _wait_until_healthy(stack, process, log)
        yield stack
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the stack did not stop:\n{log.read_text()}") from None


def _wait_until_healthy(stack: RunningStack, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{stack.base_url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the stack did not start:\n{log.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
