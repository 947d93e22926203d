"""The rejection rule taken apart, so that it can be proven piece by piece and broken on purpose.

`Rules()` is what production does; `accept_by` is production's loop over replaceable rules (a test
holds it against the real one). A mutant is a `Rules` with one piece replaced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace import acceptance, rng
from headrace.acceptance import Acceptance
from headrace.rng import Purpose
from headrace.sampling import draw, draw_from_row, probabilities, sparse_row
from headrace.types import Proposal, SamplingParams, SparseRow

Row = NDArray[np.floating]
Prefix = tuple[int, ...]


def residual(target_row: Row, sent_row: SparseRow, rejected_id: int) -> Row:
    return acceptance.residual(target_row, sent_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Every piece that a mutant may replace."""

    residual: Callable[[Row, SparseRow, int], Row] = residual
    is_accepted: Callable[[float, float], bool] = acceptance.is_accepted
    uniform: Callable[[int, int, Purpose], float] = rng.uniform


def accept_by(
    rules: Rules,
    proposal: Proposal,
    target_row: Callable[[int], Row],
    *,
    seed: int,
    first_position: int,
) -> Acceptance:
    """`headrace.acceptance.accept` over some rules."""
    for index, token_id in enumerate(proposal.token_ids):
        position = first_position + index
        row, sent = target_row(index), proposal.draft_rows[index]
        sent_prob = float(sent.probs[sent.token_ids == token_id].sum())
        chance = acceptance.acceptance_probability(float(row[token_id]), sent_prob)
        if not rules.is_accepted(rules.uniform(seed, position, Purpose.ACCEPT), chance):
            left = rules.residual(row, sent, token_id)
            token = draw(left, rules.uniform(seed, position, Purpose.RECOVER))
            return Acceptance(
                num_accepted=index, output_token_ids=(*proposal.token_ids[:index], token)
            )
    gamma = proposal.gamma
    token = draw(target_row(gamma), rules.uniform(seed, first_position + gamma, Purpose.BONUS))
    return Acceptance(num_accepted=gamma, output_token_ids=(*proposal.token_ids, token))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A target and a draft, as conditionals on the tokens before."""

    vocab_size: int
    gamma: int
    target: Callable[[Prefix], Row]
    drawn: Callable[[Prefix], Row]
    """What draft tokens are drawn from."""
    sent: Callable[[Prefix], Row]
    """What the draft says they were drawn from; equal unless something is wrong."""


def sparse(row: Row) -> SparseRow:
    """A full row as a sparse one, in its own precision."""
    token_ids = np.flatnonzero(row)
    return SparseRow(token_ids=token_ids, probs=row[token_ids])


def target_joint(case: Case) -> dict[Prefix, float]:
    """The probability of every sequence of gamma + 1 tokens under the target alone."""
    joint = {}
    for tokens in product(range(case.vocab_size), repeat=case.gamma + 1):
        weight = 1.0
        for index, token in enumerate(tokens):
            weight *= float(case.target(tokens[:index])[token])
        joint[tokens] = weight
    return joint


def speculative_joint(case: Case, rules: Rules) -> dict[Prefix, float]:
    """The same after one speculative step, completed by the target's own draws; exact.

    Every outcome is enumerated: each draft token, its acceptance, each recovered or bonus token.
    """
    joint = dict.fromkeys(product(range(case.vocab_size), repeat=case.gamma + 1), 0.0)
    for output, weight in _outcomes(case, rules, (), 1.0):
        for tokens, share in _completions(case, output, weight):
            joint[tokens] += share
    return joint


def total_variation(one: dict[Prefix, float], other: dict[Prefix, float]) -> float:
    """Half the sum of all differences."""
    return 0.5 * sum(abs(one[tokens] - other[tokens]) for tokens in one)


def _outcomes(
    case: Case, rules: Rules, prefix: Prefix, weight: float
) -> Iterator[tuple[Prefix, float]]:
    target = case.target(prefix)
    if len(prefix) == case.gamma:
        for bonus in map(int, np.flatnonzero(target)):
            yield (*prefix, bonus), weight * float(target[bonus])
        return
    drawn, sent = case.drawn(prefix), case.sent(prefix)
    for token in map(int, np.flatnonzero(drawn)):
        here = weight * float(drawn[token])
        chance = acceptance.acceptance_probability(float(target[token]), float(sent[token]))
        if chance > 0:
            yield from _outcomes(case, rules, (*prefix, token), here * chance)
        if chance < 1:
            left = rules.residual(target, sparse(sent), token)
            for recovered in map(int, np.flatnonzero(left)):
                yield (*prefix, recovered), here * (1 - chance) * float(left[recovered])


def _completions(case: Case, output: Prefix, weight: float) -> Iterator[tuple[Prefix, float]]:
    if len(output) == case.gamma + 1:
        yield output, weight
        return
    row = case.target(output)
    for token in map(int, np.flatnonzero(row)):
        yield from _completions(case, (*output, token), weight * float(row[token]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCase:
    """Logits that depend on the token before, and how draft rows are made of them."""

    target_logits: NDArray[np.float32]
    """[V + 1, V] the last row is for the start."""
    draft_logits: NDArray[np.float32]
    """[V + 1, V]."""
    sampling: SamplingParams
    gamma: int

    @property
    def vocab_size(self) -> int:
        return int(self.target_logits.shape[1])


class Accept(Protocol):
    """`headrace.acceptance.accept`, or a mutant of it."""

    def __call__(
        self,
        proposal: Proposal,
        target_row: Callable[[int], Row],
        *,
        seed: int,
        first_position: int,
    ) -> Acceptance: ...


def sample_outputs(case: SampledCase, accept: Accept, *, num_trials: int) -> NDArray[np.int64]:
    """[num_trials, gamma + 1] what many speculative decodes give, one seed each.

    Each goes on step by step, as a gateway does, so that positions whose draft token was cast away
    draw with the same numbers again.
    """
    targets = [_probabilities(row, case).numpy() for row in case.target_logits]
    drafts = [sparse_row(_probabilities(row, case), 128) for row in case.draft_logits]
    start = case.vocab_size
    outputs = np.empty((num_trials, case.gamma + 1), dtype=np.int64)
    for seed in range(num_trials):
        tokens: list[int] = []
        while len(tokens) <= case.gamma:
            before, rows = [tokens[-1] if tokens else start], []
            for position in range(len(tokens), case.gamma):
                rows.append(drafts[before[-1]])
                number = rng.uniform(seed, position, Purpose.DRAFT)
                before.append(draw_from_row(rows[-1], number))
            step = accept(
                Proposal(token_ids=tuple(before[1:]), draft_rows=tuple(rows)),
                [targets[token] for token in before].__getitem__,
                seed=seed,
                first_position=len(tokens),
            )
            tokens += step.output_token_ids
        outputs[seed] = tokens
    return outputs


def chi_square_excess(outputs: NDArray[np.int64], case: SampledCase) -> float:
    """How far the worst statistic is from its bound df + 10 sqrt(2 df); positive fails.

    Statistics: each token alone, and every pair of them.
    """
    rows = np.stack([_probabilities(row, case).double().numpy() for row in case.target_logits])
    joint = rows[case.vocab_size]
    for _ in range(case.gamma):
        joint = joint[..., None] * rows[: case.vocab_size]
    places = range(outputs.shape[1])
    worst = -np.inf
    for chosen in [*combinations(places, 1), *combinations(places, 2)]:
        law = joint.sum(axis=tuple(place for place in places if place not in chosen))
        seen = np.ravel_multi_index(tuple(outputs[:, chosen].T), law.shape)
        counts = np.bincount(seen, minlength=law.size)
        worst = max(worst, _excess(counts, law.ravel() * len(outputs)))
    return worst


def _probabilities(logits: NDArray[np.float32], case: SampledCase) -> torch.Tensor:
    return probabilities(torch.from_numpy(logits), case.sampling)


def _excess(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic less its bound; bins that expect fewer than 5 are merged."""
    is_large = expected >= 5
    counts_merged = np.append(counts[is_large], counts[~is_large].sum())
    expected_merged = np.append(expected[is_large], expected[~is_large].sum())
    is_used = expected_merged > 0
    if counts_merged[~is_used].sum():
        return float("inf")
    statistic = float(
        ((counts_merged - expected_merged)[is_used] ** 2 / expected_merged[is_used]).sum()
    )
    degrees = int(is_used.sum()) - 1
    return float(statistic - (degrees + 10 * (2 * degrees) ** 0.5))
