"""`headrace doctor`."""

import json
from typing import Annotated

import typer

from headrace.cli.options import Draft, Memory, Target


def doctor(
    target: Target = "demo",
    draft: Draft = None,
    budget: Memory = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a model can be served here, and predict how fast.

    Reads the drive for a few seconds; starts no process.
    """
    from headrace.bench.diagnosis import diagnose
    from headrace.catalog.resolve import resolve_draft, resolve_target
    from headrace.cli.partition import available_budget
    from headrace.cli.progress import fetch_reporter
    from headrace.sizes import parse_bytes

    budget_bytes = available_budget() if budget == "auto" else parse_bytes(budget)
    with fetch_reporter() as reporter:
        target_dir = resolve_target(target, reporter)
        draft_dir = resolve_draft(draft, target, reporter)
    diagnosis = diagnose(target_dir, draft_dir, budget_bytes=budget_bytes)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_object()))
    else:
        for check in diagnosis.checks:
            typer.echo(f"{'ok' if check.is_ok else 'FAILED':8}{check.name:15}{check.finding}")
        if diagnosis.prediction is not None:
            expected = diagnosis.prediction
            typer.echo(
                f"expect  {expected.seconds_per_sweep:.3g} s a sweep: {expected.tokens_per_s:.3g} "
                f"tokens/s for one request, {expected.tokens_per_s_16:.3g} for 16 together, before "
                f"speculation; the {expected.limited_by} is the limit"
            )
    if not diagnosis.is_ok:
        raise typer.Exit(1)
