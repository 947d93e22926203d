"""Which tokens of which sequences travel in the next sweep. Pure: no I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

_PROMPT_SHARE = 4
"""A quarter of the budget is kept for prompts while any wait, so that neither starves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one step still has to send through the target."""

    num_pending: int
    """Committed tokens without KV, at least 1."""
    gamma: int
    """Draft tokens; they travel together with the last pending token."""

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.num_pending + self.gamma


def plan_sweep(loads: Sequence[Load], *, max_tokens: int) -> list[int]:
    """Share a sweep's token budget.

    Steps whose prompt is done come first, in order; prompts fill what is left, in chunks. The
    first step always advances, whatever the budget.

    Args:
        loads: Of each pending step, oldest first; at least one.
        max_tokens: Budget of the sweep.

    Returns:
        Tokens of each step in this sweep: all of them, a chunk of its pending tokens, or 0.
    """
    takes = [0] * len(loads)
    prompts = [i for i, load in enumerate(loads) if load.num_pending > 1]
    decodes = [i for i, load in enumerate(loads) if load.num_pending == 1]
    left = max_tokens
    kept = max_tokens // _PROMPT_SHARE if prompts else 0
    for index in decodes:
        if loads[index].num_tokens <= left - kept:
            takes[index] = loads[index].num_tokens
            left -= takes[index]
    for index in prompts:
        load = loads[index]
        takes[index] = (
            load.num_tokens if load.num_tokens <= left else min(left, load.num_pending - 1)
        )
        left -= takes[index]
    if not any(takes):
        takes[0] = 1 if loads[0].num_pending > 1 else loads[0].num_tokens
    return takes
