"""Partitions a memory budget. Pure: no I/O, no torch.

Everything that a deployment will ever hold is decided here, allocated at its start and never
exceeded: slots, weights that stay, KV blocks, workspace, the draft, and what the processes need
for themselves. What is left over keeps units of weights in memory, spread over the sweep. A model
that fits is not streamed at all; a budget that cannot work is refused with the smallest that would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.model.sweep_plan import SweepPlan

MIB = 1 << 20
TARGET_BASE_BYTES = 440 * MIB
"""A target process that serves nothing yet: interpreter, torch, tokenizer (measured)."""
DRAFT_BASE_BYTES = 440 * MIB
"""A draft process, likewise."""
STREAMER_BASE_BYTES = 56 * MIB
"""A streamer process without slots (measured)."""
_KV_BLOCK = 16
_UNIT_BYTES = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)
"""Sizes to try: larger units mean larger reads, smaller ones less memory."""
_MIN_SLOTS = 4
_MAX_SLOTS = 16
"""More than half a gigabyte of slots hides no more: what is left is better used for weights."""
_SLOT_MARGIN_BYTES = 256 << 10
"""Alignment of the reads in a slot."""
_SWEEP_GRAIN = 16
_MIN_SWEEP_TOKENS = 32
_MAX_SWEEP_TOKENS = 256
_MIN_KV_TOKENS = 512
_MAX_KV_TOKENS = 16_384
_KV_SHARE = 0.3
"""Of what is left when the smallest envelope is paid for."""
_SLOT_SHARE = 0.2
"""Likewise."""
_SLOT_SHARE_WITH_DRAFT = 0.45
"""Slots fill while the draft guesses: they are worth as much as weights that stay."""
_SWEEP_SHARE = 0.2
"""Likewise; what is then left keeps weights in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDemand:
    """What a draft needs."""

    weight_bytes: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a deployment needs memory for."""

    plan_for: Callable[[int], SweepPlan]
    """The target's sweep, cut into units of about so many bytes."""
    always_resident_bytes: int
    """Of the target's norms, biases and the like."""
    weight_bytes: int
    """Of all the target's weights."""
    kv_token_bytes: int
    """Keys and values of one token in all layers of the target."""
    workspace_token_bytes: int
    """Activations and logits of one token of a sweep."""
    max_context_tokens: int
    """Longest sequence of the target."""
    draft: DraftDemand | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A partition of memory."""

    plan: SweepPlan
    """Which units are streamed and which stay."""
    unit_bytes: int
    slot_bytes: int
    num_slots: int
    """0: the model is not streamed."""
    max_sweep_tokens: int
    kv_tokens: int
    slots_total_bytes: int
    resident_bytes: int
    kv_bytes: int
    workspace_bytes: int
    draft_bytes: int
    base_bytes: int
    """Of all processes."""

    @property
    def is_streamed(self) -> bool:
        """Whether there is a streamer."""
        return self.num_slots > 0

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return (
            self.slots_total_bytes
            + self.resident_bytes
            + self.kv_bytes
            + self.workspace_bytes
            + self.draft_bytes
            + self.base_bytes
        )

    @property
    def target_bytes(self) -> int:
        """Of the target process, without the slots that it shares with the streamer."""
        return TARGET_BASE_BYTES + self.resident_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def streamer_bytes(self) -> int:
        """Of the streamer process, slots included."""
        return STREAMER_BASE_BYTES + self.slots_total_bytes if self.is_streamed else 0


def fit(demand: Demand, *, budget_bytes: int, is_streamed: bool | None = None) -> Envelope:
    """The best partition of a budget; a larger one never has less of anything.

    But for whole units: units of another size may keep up to one of them less in memory, and a
    model that just fits has less KV than when it was streamed.

    Args:
        demand: What needs memory.
        budget_bytes: For target, streamer and draft together.
        is_streamed: All streamed or all resident, whatever would be best; None decides by size.

    Raises:
        ConfigError: The budget cannot work; the message has the smallest that would.
    """
    if is_streamed is not True:
        smallest = _smallest_resident(demand)
        if smallest.total_bytes <= budget_bytes:
            return _grown_resident(demand, smallest, budget_bytes - smallest.total_bytes)
    if is_streamed is not False:
        plans = _plans(demand)
        smallest = _smallest_streamed(demand, plans)
        if smallest.total_bytes <= budget_bytes:
            left_bytes = budget_bytes - smallest.total_bytes
            grown = _grown_streamed(demand, plans, smallest, left_bytes)
            return grown if is_streamed is None else _without_kept_units(grown)
    raise _too_small(budget_bytes, smallest_bytes(demand, is_streamed=is_streamed))


def smallest_bytes(demand: Demand, *, is_streamed: bool | None = None) -> int:
    """The least budget that works.

    Args:
        demand: What needs memory.
        is_streamed: As for fit.
    """
    envelopes = []
    if is_streamed is not True:
        envelopes.append(_smallest_resident(demand))
    if is_streamed is not False:
        envelopes.append(_smallest_streamed(demand, _plans(demand)))
    return min(envelope.total_bytes for envelope in envelopes)


def _plans(demand: Demand) -> dict[int, SweepPlan]:
    """The sweep in units of each size, by their size, the smallest first."""
    return {unit_bytes: demand.plan_for(unit_bytes) for unit_bytes in _UNIT_BYTES}


def _smallest_streamed(demand: Demand, plans: Mapping[int, SweepPlan]) -> Envelope:
    unit_bytes = min(plans, key=lambda size: _min_slots_bytes(plans[size]))
    plan = plans[unit_bytes]
    return replace(
        _smallest_resident(demand),
        plan=plan,
        unit_bytes=unit_bytes,
        slot_bytes=_slot_bytes(plan),
        num_slots=_num_slots(plan, _MIN_SLOTS),
        slots_total_bytes=_min_slots_bytes(plan),
        resident_bytes=demand.always_resident_bytes,
        base_bytes=TARGET_BASE_BYTES + STREAMER_BASE_BYTES,
    )


def _smallest_resident(demand: Demand) -> Envelope:
    kv_tokens = min(_MIN_KV_TOKENS, _rounded(demand.max_context_tokens))
    return Envelope(
        plan=SweepPlan(units=(), pieces_by_use=()),
        unit_bytes=_UNIT_BYTES[-1],
        slot_bytes=0,
        num_slots=0,
        max_sweep_tokens=_MIN_SWEEP_TOKENS,
        kv_tokens=kv_tokens,
        slots_total_bytes=0,
        resident_bytes=demand.weight_bytes,
        kv_bytes=kv_tokens * demand.kv_token_bytes,
        workspace_bytes=_MIN_SWEEP_TOKENS * demand.workspace_token_bytes,
        draft_bytes=_draft_bytes(demand, kv_tokens),
        base_bytes=TARGET_BASE_BYTES,
    )


def _grown_resident(demand: Demand, smallest: Envelope, left_bytes: int) -> Envelope:
    """Spend what is left on longer sweeps and on KV."""
    sweep_bytes = min(int(_SWEEP_SHARE * left_bytes), _max_more_sweep_bytes(demand))
    return _with_tokens(demand, smallest, sweep_bytes, left_bytes - sweep_bytes)


def _grown_streamed(
    demand: Demand, plans: Mapping[int, SweepPlan], smallest: Envelope, left_bytes: int
) -> Envelope:
    """Spend what is left on longer sweeps, KV, slots, and weights that stay."""
    sweep_bytes = min(int(_SWEEP_SHARE * left_bytes), _max_more_sweep_bytes(demand))
    kv_bytes = min(int(_KV_SHARE * left_bytes), _max_more_kv_bytes(demand, smallest))
    slots_bytes = min(
        smallest.slots_total_bytes + int(_slot_share(demand) * left_bytes),
        max(_num_slots(plan, _MAX_SLOTS) * _slot_bytes(plan) for plan in plans.values()),
    )
    weights_bytes = left_bytes - sweep_bytes - kv_bytes - (slots_bytes - smallest.slots_total_bytes)
    unit_bytes = max(size for size in plans if _min_slots_bytes(plans[size]) <= slots_bytes)
    plan = plans[unit_bytes]
    slot_bytes = _slot_bytes(plan)
    num_slots = min(slots_bytes // slot_bytes, _num_slots(plan, _MAX_SLOTS))
    # A unit is left to stream: models that fit as a whole are not streamed.
    plan = plan.keeping(min(weights_bytes, plan.streamed_bytes - 1))
    return replace(
        _with_tokens(demand, smallest, sweep_bytes, kv_bytes),
        plan=plan,
        unit_bytes=unit_bytes,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        slots_total_bytes=num_slots * slot_bytes,
        resident_bytes=smallest.resident_bytes + plan.resident_bytes,
    )


def _slot_share(demand: Demand) -> float:
    return _SLOT_SHARE if demand.draft is None else _SLOT_SHARE_WITH_DRAFT


def _without_kept_units(envelope: Envelope) -> Envelope:
    return replace(
        envelope,
        plan=envelope.plan.keeping(0),
        resident_bytes=envelope.resident_bytes - envelope.plan.resident_bytes,
    )


def _slot_bytes(plan: SweepPlan) -> int:
    return plan.max_unit_bytes + _SLOT_MARGIN_BYTES


def _num_slots(plan: SweepPlan, num_wanted: int) -> int:
    """More slots than units are of no use."""
    return min(num_wanted, len(plan.units))


def _min_slots_bytes(plan: SweepPlan) -> int:
    return _num_slots(plan, _MIN_SLOTS) * _slot_bytes(plan)


def _with_tokens(demand: Demand, smallest: Envelope, sweep_bytes: int, kv_bytes: int) -> Envelope:
    """An envelope with some bytes more of workspace and KV, used up in whole steps."""
    more_kv_tokens = min(kv_bytes, _max_more_kv_bytes(demand, smallest)) // _kv_token_cost(demand)
    more_sweep_tokens = sweep_bytes // demand.workspace_token_bytes
    kv_tokens = smallest.kv_tokens + more_kv_tokens // _KV_BLOCK * _KV_BLOCK
    max_sweep_tokens = smallest.max_sweep_tokens + more_sweep_tokens // _SWEEP_GRAIN * _SWEEP_GRAIN
    return replace(
        smallest,
        max_sweep_tokens=max_sweep_tokens,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * demand.kv_token_bytes,
        workspace_bytes=max_sweep_tokens * demand.workspace_token_bytes,
        draft_bytes=_draft_bytes(demand, kv_tokens),
    )


def _max_more_sweep_bytes(demand: Demand) -> int:
    return (_MAX_SWEEP_TOKENS - _MIN_SWEEP_TOKENS) * demand.workspace_token_bytes


def _max_more_kv_bytes(demand: Demand, smallest: Envelope) -> int:
    return (_MAX_KV_TOKENS - smallest.kv_tokens) * _kv_token_cost(demand)


def _kv_token_cost(demand: Demand) -> int:
    """Of target and draft."""
    return demand.kv_token_bytes + (0 if demand.draft is None else demand.draft.kv_token_bytes)


def _draft_bytes(demand: Demand, kv_tokens: int) -> int:
    if demand.draft is None:
        return 0
    kv_bytes = kv_tokens * demand.draft.kv_token_bytes
    return DRAFT_BASE_BYTES + demand.draft.weight_bytes + kv_bytes


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _KV_BLOCK) * _KV_BLOCK


def _too_small(budget_bytes: int, needed_bytes: int) -> ConfigError:
    return ConfigError(
        f"a budget of {budget_bytes // MIB} MiB is too small for this model: give at least "
        f"{-(-needed_bytes // MIB)}M"
    )
