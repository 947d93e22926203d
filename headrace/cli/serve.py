"""`headrace serve`."""

import asyncio
import signal
from typing import Annotated

import typer

from headrace.cli.options import (
    DEFAULT_GAMMA,
    LOOPBACK,
    Draft,
    HttpPort,
    Memory,
    StreamOrKeep,
    Target,
)
from headrace.cli.signals import Interrupted, until_signal


def serve(
    target: Target = "demo",
    draft: Draft = None,
    gamma: Annotated[
        int, typer.Option(min=0, max=64, help="Draft tokens a step; 0 is plain decoding.")
    ] = DEFAULT_GAMMA,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = LOOPBACK,
    http_port: HttpPort = 8001,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 50051,
    memory: Memory = "auto",
    weights: StreamOrKeep = "auto",
) -> None:
    """Start every process on this machine and serve until Ctrl-C."""
    from headrace.cli.launch import serve_stack, stack_config

    config = stack_config(
        target=target,
        draft=draft,
        gamma=gamma,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        memory=memory,
        weights=weights,
    )
    try:
        asyncio.run(until_signal(serve_stack(config)))
    except Interrupted as interrupted:
        typer.echo("stopped", err=True)
        if interrupted.number is not signal.SIGINT:  # Ctrl-C is how a server is meant to end
            raise typer.Exit(128 + interrupted.number) from None
