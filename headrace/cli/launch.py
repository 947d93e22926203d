"""From the options of a command to a running stack. Resolves models and ports first."""

import asyncio
import os
from collections.abc import Callable

from headrace.catalog.resolve import resolve_draft, resolve_target
from headrace.cli.chat import Answer, Question, ask
from headrace.cli.partition import Weights, find_partition
from headrace.cli.ports import claim_port
from headrace.cli.progress import fetch_reporter
from headrace.cli.stack import run_stack
from headrace.cli.status import open_display
from headrace.cli.wiring import StackConfig
from headrace.errors import ConfigError


def stack_config(
    *,
    target: str,
    draft: str | None,
    gamma: int,
    host: str,
    http_port: int,
    grpc_port: int,
    memory: str,
    weights: Weights,
) -> StackConfig:
    """What to start, with every model on disk and every port free.

    Raises:
        ConfigError: A model cannot be had or does not fit the memory, or a port is taken.
    """
    if http_port == grpc_port != 0:
        raise ConfigError(
            f"HTTP and gRPC cannot share port {http_port}: choose another --grpc-port"
        )
    http_port = claim_port(host, http_port, "--http-port")
    grpc_port = claim_port(host, grpc_port, "--grpc-port")
    with fetch_reporter() as reporter:
        target_dir = resolve_target(target, reporter)
        draft_dir = resolve_draft(draft, target, reporter)
    return StackConfig(
        target_dir=target_dir,
        draft_dir=draft_dir,
        gamma=gamma,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        partition=find_partition(target_dir, draft_dir, memory=memory, weights=weights),
    )


async def serve_stack(config: StackConfig) -> None:
    """Serve until cancelled; raises HeadraceError when a process ends."""
    await run_stack(config, os.environ, open_display(), asyncio.Event().wait)


async def ask_stack(
    config: StackConfig, question: Question, on_text: Callable[[str], None]
) -> Answer:
    """Start everything, ask one question, stop everything; raises as `ask` and `run_stack` do."""
    display = open_display()

    async def body() -> Answer:
        display.close()  # the answer gets the terminal
        return await ask(config.base_url, question, on_text)

    return await run_stack(config, os.environ, display, body)
