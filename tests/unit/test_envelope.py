"""Partitions of budgets for a made-up model of 24 layers, and for units that cannot be divided."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.envelope import Demand, DraftDemand, Envelope, fit, smallest_bytes
from headrace.errors import ConfigError
from headrace.model.checkpoint import TensorSpan
from headrace.model.sweep_plan import Piece, SweepPlan, WeightUse

MIB = 1 << 20
GIB = 1 << 30
DRAFT = DraftDemand(weight_bytes=270 * MIB, kv_token_bytes=23_040)


def matrix(num_rows: int, num_columns: int, *, is_divisible: bool = True) -> WeightUse:
    span = TensorSpan(
        name="weight",
        file=Path("model.safetensors"),
        offset_bytes=0,
        num_bytes=2 * num_rows * num_columns,
        dtype="BF16",
        shape=(num_rows, num_columns),
    )
    piece = Piece(span=span, begin_row=0, end_row=num_rows)
    return WeightUse(pieces=(piece,), is_divisible=is_divisible)


def demand(uses: list[WeightUse], *, draft: DraftDemand | None = None) -> Demand:
    return Demand(
        plan_for=cache(lambda unit_bytes: SweepPlan.pack(uses, unit_bytes=unit_bytes)),
        always_resident_bytes=MIB,
        weight_bytes=sum(use.num_bytes for use in uses) + 65 * MIB,  # embeddings
        kv_token_bytes=98_304,
        workspace_token_bytes=500_000,
        max_context_tokens=32_768,
        draft=draft,
    )


LAYER = [matrix(3072, 2048), matrix(2048, 2048), matrix(16_384, 2048), matrix(2048, 8192)]
LAYERED = demand(LAYER * 24)
DEMANDS = {
    "layers": LAYERED,
    "layers with a draft": replace(LAYERED, draft=DRAFT),
    "stacked experts of 96 MiB": demand([*LAYER, matrix(24_576, 2048, is_divisible=False)] * 8),
    "indivisible matrices of 6 MiB": demand([matrix(1536, 2048, is_divisible=False)] * 300),
    "smaller than a unit": demand([matrix(1024, 1024)]),
    "a few units": demand([matrix(1024, 1024)] * 9, draft=DRAFT),
    "a short context": replace(LAYERED, max_context_tokens=200),
}
budgets = st.integers(1, 16 * GIB)
demands = st.sampled_from(list(DEMANDS.values()))
choices = st.sampled_from([None, True, False])


def fit_or_none(wanted: Demand, budget_bytes: int, is_streamed: bool | None) -> Envelope | None:
    try:
        return fit(wanted, budget_bytes=budget_bytes, is_streamed=is_streamed)
    except ConfigError:
        return None


@settings(deadline=None)
@given(demands, budgets, choices)
def test_the_parts_never_exceed_the_budget(
    wanted: Demand, budget_bytes: int, is_streamed: bool | None
) -> None:
    envelope = fit_or_none(wanted, budget_bytes, is_streamed)
    if envelope is None:
        assert budget_bytes < smallest_bytes(wanted, is_streamed=is_streamed)
        return
    kv_draft = 0 if wanted.draft is None else wanted.draft.kv_token_bytes
    parts = [
        envelope.target_bytes,
        envelope.streamer_bytes,
        envelope.draft_bytes,
    ]
    assert sum(parts) == envelope.total_bytes <= budget_bytes
    assert envelope.kv_bytes == envelope.kv_tokens * wanted.kv_token_bytes
    assert envelope.workspace_bytes == envelope.max_sweep_tokens * wanted.workspace_token_bytes
    assert envelope.slots_total_bytes == envelope.num_slots * envelope.slot_bytes
    if wanted.draft is not None:
        assert envelope.draft_bytes > wanted.draft.weight_bytes + envelope.kv_tokens * kv_draft
    else:
        assert envelope.draft_bytes == 0


@settings(deadline=None)
@given(demands, budgets, choices)
def test_all_weights_are_somewhere(
    wanted: Demand, budget_bytes: int, is_streamed: bool | None
) -> None:
    envelope = fit_or_none(wanted, budget_bytes, is_streamed)
    if envelope is None:
        return
    if not envelope.is_streamed:
        assert envelope.resident_bytes == wanted.weight_bytes
        return
    assert envelope.resident_bytes == wanted.always_resident_bytes + envelope.plan.resident_bytes
    assert envelope.plan.streamed_units
    assert envelope.slot_bytes > envelope.plan.max_unit_bytes
    assert envelope.num_slots <= len(envelope.plan.units)


@settings(deadline=None)
@given(demands, budgets, st.integers(0, 4 * GIB), choices)
def test_a_larger_budget_never_gives_less(
    wanted: Demand, budget_bytes: int, more_bytes: int, is_streamed: bool | None
) -> None:
    small = fit_or_none(wanted, budget_bytes, is_streamed)
    large = fit_or_none(wanted, budget_bytes + more_bytes, is_streamed)
    if small is None:
        return
    assert large is not None
    if large.is_streamed != small.is_streamed:
        assert small.is_streamed
        return
    assert large.kv_tokens >= small.kv_tokens
    assert large.max_sweep_tokens >= small.max_sweep_tokens
    assert large.unit_bytes >= small.unit_bytes
    unit_bytes = 0 if large.unit_bytes == small.unit_bytes else large.slot_bytes
    assert large.slots_total_bytes >= small.slots_total_bytes - unit_bytes
    assert large.resident_bytes >= small.resident_bytes - unit_bytes


@pytest.mark.parametrize("is_streamed", [None, True, False])
@pytest.mark.parametrize("name", DEMANDS)
def test_the_smallest_budget_works_and_a_byte_less_does_not(
    name: str, is_streamed: bool | None
) -> None:
    wanted = DEMANDS[name]
    smallest = smallest_bytes(wanted, is_streamed=is_streamed)
    envelope = fit(wanted, budget_bytes=smallest, is_streamed=is_streamed)
    assert envelope.total_bytes == smallest
    with pytest.raises(ConfigError, match=f"give at least {-(-smallest // MIB)}M$"):
        fit(wanted, budget_bytes=smallest - 1, is_streamed=is_streamed)


@pytest.mark.parametrize("name", DEMANDS)
def test_no_size_of_units_works_with_less_than_the_smallest_budget(name: str) -> None:
    wanted = DEMANDS[name]
    slots = []
    for unit_bytes in (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB):
        plan = wanted.plan_for(unit_bytes)
        slots.append(min(4, len(plan.units)) * (plan.max_unit_bytes + (256 << 10)))
    envelope = fit(wanted, budget_bytes=smallest_bytes(wanted, is_streamed=True), is_streamed=True)
    assert envelope.slots_total_bytes == min(slots)


def test_a_model_that_fits_is_resident() -> None:
    envelope = fit(LAYERED, budget_bytes=smallest_bytes(LAYERED, is_streamed=False))
    assert not envelope.is_streamed
    assert envelope.streamer_bytes == 0


def test_a_model_that_is_to_be_streamed_keeps_nothing_though_it_fits() -> None:
    envelope = fit(LAYERED, budget_bytes=8 * GIB, is_streamed=True)
    assert envelope.is_streamed
    assert envelope.plan.streamed_units == envelope.plan.units


def test_a_generous_budget_gives_whole_sweeps_and_long_contexts() -> None:
    envelope = fit(LAYERED, budget_bytes=8 * GIB)
    assert (envelope.max_sweep_tokens, envelope.kv_tokens) == (256, 16_384)


def test_resident_units_are_spread_over_the_sweep() -> None:
    plan = fit(LAYERED, budget_bytes=3 * GIB // 2).plan
    kept = sorted(plan.resident_units)
    assert len(kept) > 4
    gaps = {end - begin for begin, end in pairwise(kept)}
    assert max(gaps) <= 3 * min(gaps)  # three-distance theorem: the largest is the others' sum


def test_little_is_left_unused_while_weights_are_streamed() -> None:
    budget_bytes = 3 * GIB // 2
    envelope = fit(LAYERED, budget_bytes=budget_bytes)
    steps = 2 * envelope.slot_bytes + 16 * (98_304 + 500_000)
    assert budget_bytes - envelope.total_bytes < steps


def test_a_draft_takes_its_weights_and_as_many_kv_tokens_as_the_target() -> None:
    without = smallest_bytes(LAYERED, is_streamed=True)
    with_draft = smallest_bytes(replace(LAYERED, draft=DRAFT), is_streamed=True)
    assert with_draft - without == 440 * MIB + DRAFT.weight_bytes + 512 * DRAFT.kv_token_bytes


def test_a_short_context_needs_no_more_kv_than_it_can_fill() -> None:
    short = DEMANDS["a short context"]
    assert fit(short, budget_bytes=smallest_bytes(short)).kv_tokens == 208  # 13 blocks of 16
