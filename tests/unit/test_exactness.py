"""The output follows the target's own distribution: in closed form, then by sampling.

Each mutant is a fault that a well-known system shipped, or could have; a proof that lets one live
is no proof. Mutants that need random numbers to show are killed by sampling, the others in closed
form.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace import rng
from headrace.acceptance import accept, is_accepted
from headrace.rng import Purpose
from headrace.sampling import probabilities
from headrace.types import Proposal, SamplingParams, SparseRow
from tests.support.exactness import (
    Case,
    Prefix,
    Row,
    Rules,
    SampledCase,
    accept_by,
    chi_square_excess,
    residual,
    sample_outputs,
    sparse,
    speculative_joint,
    target_joint,
    total_variation,
)

KINDS = ("random", "equal", "zeros", "one-hot", "top-k")


def normalised(weights: Row) -> Row:
    row: Row = weights / weights.sum()
    return row


def one_hot(row: Row) -> Row:
    hot: Row = (np.arange(row.size) == row.argmax()).astype(np.float64)
    return hot


def softmax(logits: Row) -> Row:
    weights: Row = np.exp(logits - logits.max())
    return normalised(weights)


def top_k(row: Row, count: int) -> Row:
    return normalised(np.where(row >= np.sort(row)[-count], row, 0.0))


def logits_of(prefix: Prefix, vocab_size: int, salt: int) -> Row:
    """Logits that depend on every token before."""
    return np.random.default_rng([salt, *(token + 1 for token in prefix)]).normal(
        0, 1.5, vocab_size
    )


def make_case(kind: str, vocab_size: int, gamma: int, salt: int) -> Case:
    def target(prefix: Prefix) -> Row:
        row = softmax(logits_of(prefix, vocab_size, salt))
        if kind == "zeros" and vocab_size > 1:
            row[len(prefix) % vocab_size] = 0.0
        return one_hot(row) if kind == "one-hot" else normalised(row)

    def draft(prefix: Prefix) -> Row:
        if kind == "equal":
            return target(prefix)
        row = softmax(logits_of(prefix, vocab_size, salt + 1_000))
        if kind == "one-hot":
            return one_hot(row)
        return top_k(row, max(1, vocab_size // 2)) if kind in ("top-k", "zeros") else row

    return Case(vocab_size=vocab_size, gamma=gamma, target=target, drawn=draft, sent=draft)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5])
def test_closed_form_total_variation_is_zero(kind: str, vocab_size: int) -> None:
    for gamma in range(5):
        for salt in range(3 if vocab_size < 5 else 1):
            case = make_case(kind, vocab_size, gamma, salt)
            spec = speculative_joint(case, Rules())
            assert abs(sum(spec.values()) - 1) < 1e-12
            assert total_variation(spec, target_joint(case)) < 1e-12


def argmax_with_softmax_rows(case: Case) -> Case:
    return replace(case, drawn=lambda prefix: one_hot(case.drawn(prefix)))


def rows_before_top_k(case: Case) -> Case:
    return replace(case, drawn=lambda prefix: top_k(case.drawn(prefix), 2))


def rows_at_another_temperature(case: Case) -> Case:
    return replace(case, drawn=lambda prefix: normalised(case.sent(prefix) ** (1 / 0.8)))


def unchanged(case: Case) -> Case:
    return case


def resample_from_target(target_row: Row, sent_row: SparseRow, rejected_id: int) -> Row:
    return target_row


def zero_the_rejected_token(target_row: Row, sent_row: SparseRow, rejected_id: int) -> Row:
    left = target_row.copy()
    left[rejected_id] = 0.0
    return normalised(left) if left.sum() > 0 else target_row


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedFormMutant:
    name: str
    change: Callable[[Case], Case] = unchanged
    rules: Rules = field(default_factory=Rules)


CLOSED_FORM_MUTANTS = (
    ClosedFormMutant(
        name="resample from the target after a reject", rules=Rules(residual=resample_from_target)
    ),
    ClosedFormMutant(
        name="residual only zeroes the rejected token",
        rules=Rules(residual=zero_the_rejected_token),
    ),
    ClosedFormMutant(name="argmax draft with softmax rows", change=argmax_with_softmax_rows),
    ClosedFormMutant(name="rows before top-k", change=rows_before_top_k),
    ClosedFormMutant(name="rows at another temperature", change=rows_at_another_temperature),
)


@pytest.mark.parametrize("mutant", CLOSED_FORM_MUTANTS, ids=lambda mutant: mutant.name)
def test_closed_form_kills(mutant: ClosedFormMutant) -> None:
    case = mutant.change(make_case("random", 4, 2, 0))
    assert total_variation(speculative_joint(case, mutant.rules), target_joint(case)) > 1e-3


def sampled_case(kind: str) -> SampledCase:
    vocab_size = 16
    generator = np.random.default_rng(5)
    target = generator.normal(0, 1.2, (vocab_size + 1, vocab_size)).astype(np.float32)
    noise = generator.normal(0, 0.7, target.shape).astype(np.float32)
    return SampledCase(
        target_logits=target,
        draft_logits=-target if kind == "opposed" else target + noise,
        sampling=SamplingParams(temperature=0.9),
        gamma=2,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opposed", "aligned"])
def test_sampled_outputs_follow_the_target(kind: str) -> None:
    case = sampled_case(kind)
    outputs = sample_outputs(case, accept, num_trials=200_000)
    assert chi_square_excess(outputs, case) < 0


def draft_and_residual_share_a_number(seed: int, position: int, purpose: Purpose) -> float:
    is_shared = purpose is Purpose.RECOVER
    return rng.uniform(seed, position, Purpose.DRAFT if is_shared else purpose)


def draft_and_test_share_a_number(seed: int, position: int, purpose: Purpose) -> float:
    is_shared = purpose is Purpose.ACCEPT
    return rng.uniform(seed, position, Purpose.DRAFT if is_shared else purpose)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opposed", "aligned"])
@pytest.mark.parametrize(
    "uniform",
    [draft_and_residual_share_a_number, draft_and_test_share_a_number],
    ids=lambda uniform: uniform.__name__,
)
def test_sampling_kills(uniform: Callable[[int, int, Purpose], float], kind: str) -> None:
    case = sampled_case(kind)
    mutant = partial(accept_by, Rules(uniform=uniform))
    outputs = sample_outputs(case, mutant, num_trials=20_000)
    assert chi_square_excess(outputs, case) > 0


def accepted_up_to_its_chance(number: float, chance: float) -> bool:
    return number <= chance


def test_a_number_of_zero_never_accepts_what_the_target_rules_out() -> None:
    def accepts_it(is_accepted: Callable[[float, float], bool]) -> int:
        proposal = Proposal(token_ids=(0,), draft_rows=(sparse(np.array([1.0, 0.0])),))
        rules = Rules(uniform=lambda *_: 0.0, is_accepted=is_accepted)
        ruled_out = np.array([0.0, 1.0])
        step = accept_by(rules, proposal, lambda _: ruled_out, seed=0, first_position=0)
        return step.num_accepted

    assert accepts_it(is_accepted) == 0
    assert accepts_it(accepted_up_to_its_chance) == 1, "the mutant lives"


def test_the_loop_that_the_mutants_break_is_productions() -> None:
    generator = np.random.default_rng(0)
    for seed in range(300):
        gamma, vocab_size = int(generator.integers(0, 5)), 6
        targets: NDArray[np.float64] = generator.dirichlet(np.ones(vocab_size), gamma + 1)
        drafts = generator.dirichlet(np.ones(vocab_size), gamma)
        proposal = Proposal(
            token_ids=tuple(int(generator.choice(vocab_size, p=row)) for row in drafts),
            draft_rows=tuple(sparse(row) for row in drafts),
        )
        arguments = {"seed": seed, "first_position": 7}
        ours = accept(proposal, targets.__getitem__, **arguments)
        theirs = accept_by(Rules(), proposal, targets.__getitem__, **arguments)
        assert ours == theirs


def test_float32_rows_differ_from_exact_ones_by_rounding_only() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    target = probabilities(logits, SamplingParams()).numpy()
    draft = probabilities(logits.flip(0), SamplingParams()).numpy()
    left32 = residual(target, sparse(draft), 0)
    left64 = residual(target.astype(np.float64), sparse(draft.astype(np.float64)), 0)
    assert left32.dtype == np.float32
    np.testing.assert_allclose(left32, left64, atol=1e-6)
