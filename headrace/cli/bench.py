"""`headrace bench`."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import Draft, Target
from headrace.cli.signals import Interrupted, until_signal
from headrace.sizes import format_bytes, parse_bytes

bench = typer.Typer(no_args_is_help=True, help="Measure against the disk and against peers.")

Cap = Annotated[
    str, typer.Option("--memory", help="Cap of each system's processes, page cache included.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved; the figures are medians.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@bench.command()
def stream(
    target: Target = "demo",
    memory: Cap = "1500M",
    rounds: Rounds = 5,
    tokens: Annotated[
        str, typer.Option(help="In a sweep; each kind is measured, with commas between.")
    ] = "1,8,16,32,64",
    as_json: AsJson = False,
) -> None:
    """Measure how much of the disk's rate the streamed sweeps reach; needs fio."""
    from headrace.bench.stream import measure_stream

    target_dir, _ = _directories(target, "none")
    report = _run(
        measure_stream(
            target_dir,
            memory_bytes=parse_bytes(memory),
            num_rounds=rounds,
            num_tokens=_numbers(tokens),
            say=_say,
        )
    ).as_object()
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name, value in report.items():
        typer.echo(f"{name:20} {_shown(name, value)}")


@bench.command()
def peers(
    target: Target = "demo",
    draft: Draft = "none",
    names: Annotated[
        str, typer.Option("--peers", help="Which, with commas between.")
    ] = "accelerate,airllm,llama-server",
    memory: Cap = "1500M",
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Measure other systems beside ours; each is installed in an environment of its own.

    llama.cpp is compiled at the first run, and two peers write a second copy of the model.
    """
    from headrace.bench.peers.compare import measure_peers
    from headrace.catalog.cache import cache_dir

    rows = _run(
        measure_peers(
            *_directories(target, draft),
            names=[name for name in names.split(",") if name],
            memory_bytes=parse_bytes(memory),
            num_rounds=rounds,
            cache=cache_dir() / "peers",
            say=_say,
        )
    )
    if as_json:
        typer.echo(json.dumps({"rows": rows}))
        return
    for row in rows:
        figures = "; ".join(
            f"{name} {_shown(name, value)}" for name, value in row.items() if name != "system"
        )
        typer.echo(f"{row['system']:24} {figures}")


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,8", param_hint="--tokens")
    return [int(part) for part in parts]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(name, each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(f"{row['seconds']:.3f} s at {row['tokens']} tokens" for row in value)
    if name.endswith("_bytes") and value is not None:
        return format_bytes(value)
    return str(value)


def _directories(target: str, draft: str | None) -> tuple[Path, Path | None]:
    from headrace.catalog.resolve import resolve_draft, resolve_target
    from headrace.cli.progress import fetch_reporter

    with fetch_reporter() as reporter:
        return resolve_target(target, reporter), resolve_draft(draft, target, reporter)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run(until_signal(work))
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.number) from None


def _say(line: str) -> None:
    typer.echo(line, err=True)
