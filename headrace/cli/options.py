"""Options that several commands take."""

from typing import Annotated

import typer

from headrace.cli.partition import Weights

Target = Annotated[str, typer.Option(help="demo, a model directory or a hub id.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="demo, a model directory, a hub id, or none for plain decoding.",
        show_default="the demo draft for the demo target, else none",
    ),
]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")]
Memory = Annotated[
    str,
    typer.Option(help="Budget of all model processes: 6.8G, 1500M; auto is 80 % of what is free."),
]
StreamOrKeep = Annotated[
    Weights,
    typer.Option(help="Stream weights from disk, keep them in memory, or auto: keep what fits."),
]

DEFAULT_GAMMA = 4
LOOPBACK = "127.0.0.1"
