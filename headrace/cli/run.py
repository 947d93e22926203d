"""`headrace run`."""

import asyncio
import json
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


def run(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    url: Annotated[
        str | None, typer.Option(help="A running gateway to ask; without it one is started.")
    ] = None,
    target: Target = "demo",
    draft: Draft = None,
    gamma: Annotated[
        str | None,
        typer.Option(help="Draft tokens a step: a number, or auto.", show_default="the gateway's"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    top_k: Annotated[int | None, typer.Option(min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with text and figures.")
    ] = False,
    http_port: HttpPort = 0,
    memory: Memory = "auto",
    weights: StreamOrKeep = "auto",
) -> None:
    """Ask one question and print the answer; starts and stops every process unless --url is given.

    The answer goes to stdout, the figures and everything else to stderr.
    """
    from headrace.cli.chat import Question, ask
    from headrace.cli.figures import as_object, figures_line
    from headrace.cli.launch import ask_stack, stack_config

    question = Question(
        prompt=prompt,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        gamma=_parse_gamma(gamma),
    )
    if not prompt.strip():
        raise typer.BadParameter("it is empty: give a question", param_hint="PROMPT")
    on_text = _ignore if as_json else _print_text
    if url is not None:
        answering = ask(url, question, on_text)
    else:
        config = stack_config(
            target=target,
            draft=draft,
            gamma=DEFAULT_GAMMA,
            host=LOOPBACK,
            http_port=http_port,
            grpc_port=0,
            memory=memory,
            weights=weights,
        )
        answering = ask_stack(config, question, on_text)
    try:
        answer = asyncio.run(until_signal(answering))
    except Interrupted as interrupted:
        raise typer.Exit(128 + interrupted.number) from None
    if as_json:
        typer.echo(json.dumps(as_object(answer)))
    else:
        typer.echo()
        typer.echo(figures_line(answer), err=True)


def _parse_gamma(gamma: str | None) -> int | str | None:
    if gamma is None or gamma == "auto":
        return gamma
    if not gamma.isdecimal():
        raise typer.BadParameter(f"{gamma!r} is neither a number nor auto", param_hint="--gamma")
    return int(gamma)


def _print_text(text: str) -> None:
    typer.echo(text, nl=False)


def _ignore(_: str) -> None:
    """With --json the text comes with everything else at the end."""
