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

    Steps whose prompt is done come first, in order; prompts share what is left evenly, in chunks,
    so that a long one never holds up a short one. Some step always advances, whatever the budget.

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
    # Shortest first: what one does not need of its share goes to the longer ones.
    by_length = sorted(prompts, key=lambda index: loads[index].num_tokens)
    for num_before, index in enumerate(by_length):
        load = loads[index]
        share = left // (len(by_length) - num_before)
        is_whole = load.num_tokens <= share
        takes[index] = load.num_tokens if is_whole else min(share, load.num_pending - 1)
        left -= takes[index]
    if not any(takes):
        takes[0] = 1 if loads[0].num_pending > 1 else loads[0].num_tokens
    return takes
