"""`headrace envelope`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import Draft, StreamOrKeep, Target
from headrace.cli.partition import Weights
from headrace.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from headrace.envelope import Envelope


def envelope(
    target: Target = "demo",
    draft: Draft = "none",
    budget: Annotated[
        str, typer.Option(help="For target, streamer and draft together: 6.8G, 1500M, ...")
    ] = "8G",
    weights: StreamOrKeep = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how a memory budget would be divided; reads no weights."""
    from headrace.catalog.resolve import resolve_draft, resolve_target
    from headrace.cli.progress import fetch_reporter

    budget_bytes = parse_bytes(budget)
    with fetch_reporter() as reporter:
        target_dir = resolve_target(target, reporter)
        draft_dir = resolve_draft(draft, target, reporter)
    result = partition(target_dir, draft_dir, budget_bytes, weights)
    typer.echo(json.dumps(as_object(result)) if as_json else as_text(result, budget_bytes))


def partition(
    target_dir: Path, draft_dir: Path | None, budget_bytes: int, weights: Weights
) -> "Envelope":
    """The envelope of a pair of models; imports torch and reads the models' headers.

    Raises:
        ConfigError: The budget is too small, or a model cannot be served.
    """
    from headrace.envelope import fit
    from headrace.model.checkpoint import Checkpoint
    from headrace.model.decoder import Decoder
    from headrace.model.footprint import demand_of

    is_streamed = {"auto": None, "streamed": True, "resident": False}[weights]
    draft = None if draft_dir is None else Decoder(Checkpoint.open(draft_dir))
    demand = demand_of(Decoder(Checkpoint.open(target_dir)), draft)
    return fit(demand, budget_bytes=budget_bytes, is_streamed=is_streamed)


def as_text(envelope: "Envelope", budget_bytes: int) -> str:
    """An envelope as people read it: a line for each part, and what it is for."""
    from headrace.envelope import STREAMER_BASE_BYTES, TARGET_BASE_BYTES

    units = f"for units of up to {format_bytes(envelope.plan.max_unit_bytes)}"
    rows = [
        ("target process", TARGET_BASE_BYTES, "without what follows"),
        ("  weights", envelope.resident_bytes, "that stay in memory"),
        ("  KV", envelope.kv_bytes, f"for {envelope.kv_tokens:,} tokens"),
        (
            "  workspace",
            envelope.workspace_bytes,
            f"for {envelope.max_sweep_tokens} tokens a sweep",
        ),
        ("streamer process", STREAMER_BASE_BYTES, "without what follows"),
        ("  slots", envelope.slots_total_bytes, f"{envelope.num_slots}, {units}"),
        ("draft process", envelope.draft_bytes, "with its weights and KV"),
        ("total", envelope.total_bytes, f"of {format_bytes(budget_bytes)}"),
    ]
    if not envelope.is_streamed:
        rows = [row for row in rows if row[0] not in {"streamer process", "  slots"}]
    lines = [f"{name:18}{format_bytes(size):>10}  {what}" for name, size, what in rows if size]
    return "\n".join([*lines, "", _summary(envelope)])


def _summary(envelope: "Envelope") -> str:
    if not envelope.is_streamed:
        return "The model fits: its weights stay in memory, and no streamer is needed."
    plan = envelope.plan
    num_units = len(plan.streamed_units)
    units = "one unit" if num_units == 1 else f"{num_units} units"
    return (
        f"Every sweep reads {format_bytes(plan.streamed_bytes)} in {units}; "
        f"{format_bytes(plan.resident_bytes)} of the sweep's weights stay in memory."
    )


def as_object(envelope: "Envelope") -> dict[str, Any]:
    """An envelope as JSON has it."""
    return {
        "is_streamed": envelope.is_streamed,
        "num_slots": envelope.num_slots,
        "unit_bytes": envelope.unit_bytes,
        "num_units": len(envelope.plan.units),
        "num_resident_units": len(envelope.plan.resident_units),
        "resident_unit_bytes": envelope.plan.resident_bytes,
        "streamed_bytes": envelope.plan.streamed_bytes,
        "kv_tokens": envelope.kv_tokens,
        "max_sweep_tokens": envelope.max_sweep_tokens,
        "slots_bytes": envelope.slots_total_bytes,
        "resident_bytes": envelope.resident_bytes,
        "kv_bytes": envelope.kv_bytes,
        "workspace_bytes": envelope.workspace_bytes,
        "draft_bytes": envelope.draft_bytes,
        "base_bytes": envelope.base_bytes,
        "target_process_bytes": envelope.target_bytes,
        "streamer_process_bytes": envelope.streamer_bytes,
        "total_bytes": envelope.total_bytes,
    }
