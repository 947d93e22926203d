"""The rejection rule: which draft tokens the target keeps, and what follows them.

Accepted token: a draft token that survived its test. Recovered token: drawn from the residual after
the first rejection. Bonus token: drawn from the target when every draft token was accepted. Output
tokens: the accepted ones, then the recovered or the bonus token; their distribution is the target's
own, whatever the draft.

Source: Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding",
arXiv:2211.17192, Algorithm 1. Pure; works in the precision of its input.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ShapeMismatch
from headrace.rng import Purpose, uniform
from headrace.sampling import draw
from headrace.types import Proposal, SparseRow

Row = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What became of one proposal."""

    num_accepted: int
    """0 to G."""
    output_token_ids: tuple[int, ...]
    """[num_accepted + 1] the last is the recovered or the bonus token."""


def acceptance_probability(target_prob: float, draft_prob: float) -> float:
    """The chance that a draft token survives: min(1, target / draft)."""
    return min(1.0, target_prob / draft_prob)


def is_accepted(number: float, chance: float) -> bool:
    """Whether a uniform number in [0, 1) lets a draft token with this chance survive.

    Strictly below: 0 is a number that comes, and must not accept what the target rules out.
    """
    return number < chance


def residual(target_row: Row, draft_row: SparseRow) -> Row:
    """What is left of the target where the draft did not cover it: norm(max(0, target - draft)).

    Args:
        target_row: [V].
        draft_row: What the rejected token was drawn from.

    Returns:
        [V] sums to 1. Equal rows leave nothing but rounding; then the target row itself.
    """
    left = target_row.copy()
    left[draft_row.token_ids] = np.maximum(left[draft_row.token_ids] - draft_row.probs, 0)
    total = left.sum()
    return left / total if total > 0 else target_row


def accept(
    proposal: Proposal, target_row: Callable[[int], Row], *, seed: int, first_position: int
) -> Acceptance:
    """Apply the rule to one proposal.

    Args:
        proposal: G draft tokens and the rows that they were drawn from; G may be 0.
        target_row: Gives [V], the target's view before draft token i, for i in 0 to G; called in
            order and only as far as the tokens are accepted.
        seed: Key of the sequence's random numbers.
        first_position: Index in the sequence of the first draft token.

    Raises:
        ShapeMismatch: A draft token is outside its row or the target's vocabulary.
    """
    for index, token_id in enumerate(proposal.token_ids):
        position = first_position + index
        row = target_row(index)
        draft_row = proposal.draft_rows[index]
        draft_prob = _draft_prob(draft_row, token_id, vocab_size=row.size)
        chance = acceptance_probability(float(row[token_id]), draft_prob)
        if not is_accepted(uniform(seed, position, Purpose.ACCEPT), chance):
            recovered = draw(residual(row, draft_row), uniform(seed, position, Purpose.RECOVER))
            return Acceptance(
                num_accepted=index, output_token_ids=(*proposal.token_ids[:index], recovered)
            )
    gamma = proposal.gamma
    bonus = draw(target_row(gamma), uniform(seed, first_position + gamma, Purpose.BONUS))
    return Acceptance(num_accepted=gamma, output_token_ids=(*proposal.token_ids, bonus))


def _draft_prob(row: SparseRow, token_id: int, *, vocab_size: int) -> float:
    prob = float(row.probs[row.token_ids == token_id].sum())
    if not prob > 0.0 or int(row.token_ids.max()) >= vocab_size:
        raise ShapeMismatch(
            f"draft token {token_id} does not come from its row within a vocabulary of {vocab_size}"
        )
    return prob
