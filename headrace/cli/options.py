"""Options that several commands take."""

from typing import Annotated

import typer

Target = Annotated[str, typer.Option(help="demo, a model directory or a hub id.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="demo, a model directory, a hub id, or none for plain decoding.",
        show_default="the demo draft for the demo target, else none",
    ),
]
HttpPort = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")]
Slots = Annotated[int, typer.Option(min=1, help="Layers in memory while weights are streamed.")]
Resident = Annotated[
    bool, typer.Option("--resident", help="Keep all weights in memory instead of streaming them.")
]

DEFAULT_GAMMA = 4
DEFAULT_SLOTS = 3
LOOPBACK = "127.0.0.1"
