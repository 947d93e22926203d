import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.errors import NonFiniteLogits
from headrace.sampling import draw, draw_from_row, probabilities, sparse_row
from headrace.types import SamplingParams


def plain(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The row that transformers' own warpers give."""
    scores = logits[None].float()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    row: torch.Tensor = scores.softmax(-1)[0]
    return row


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.93, 1.0])
def test_rows_are_those_of_the_librarys_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = 3 * torch.randn(5_000, generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ours, theirs = probabilities(logits, sampling), plain(logits, sampling)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert torch.equal(ours > 0, theirs > 0)


def test_top_p_that_reaches_far_is_exact_too() -> None:
    sampling = SamplingParams(top_p=0.9)
    logits = 0.01 * torch.randn(5_000, generator=torch.Generator().manual_seed(1))
    ours = probabilities(logits, sampling)
    assert 4_000 < int((ours > 0).sum()) < 5_000
    torch.testing.assert_close(ours, plain(logits, sampling), atol=1e-6, rtol=1e-4)


def test_greedy_is_one_hot_on_the_first_largest_logit() -> None:
    row = probabilities(torch.tensor([0.0, 2.0, 2.0, 1.0]), SamplingParams(temperature=0.0))
    assert row.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-9, 1e-40, 5e-324])
def test_a_tiny_temperature_neither_overflows_nor_gives_nan(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    row = probabilities(torch.tensor([900.0, -900.0, 899.0]), sampling)
    assert row.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("logits", "sampling", "kept"),
    [
        ([1.0, 2.0, 2.0, 2.0], SamplingParams(top_k=2), [1, 2]),
        ([2.0, 1.0, 3.0, 1.0], SamplingParams(top_k=3), [0, 1, 2]),
        ([0.0] * 6, SamplingParams(top_p=0.5), [0, 1, 2]),
        ([0.0] * 6, SamplingParams(top_k=4, top_p=0.5), [0, 1]),
        ([-float("inf"), 0.0, -float("inf")], SamplingParams(top_k=2), [1]),
    ],
)
def test_among_equal_logits_the_lower_ids_stay(
    logits: list[float], sampling: SamplingParams, kept: list[int]
) -> None:
    row = probabilities(torch.tensor(logits), sampling)
    assert row.nonzero()[:, 0].tolist() == kept
    assert float(row.sum()) == pytest.approx(1.0)


def test_a_sparse_row_of_equals_holds_the_lower_ids_in_order() -> None:
    assert sparse_row(torch.full((5_000,), 1 / 5_000), 4).token_ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(NonFiniteLogits):
        probabilities(torch.tensor([0.0, bad, 1.0]), SamplingParams())
    with pytest.raises(NonFiniteLogits):
        probabilities(torch.full((3,), -float("inf")), SamplingParams())


def test_single_logits_may_be_ruled_out() -> None:
    row = probabilities(torch.tensor([0.0, -float("inf"), 0.0]), SamplingParams())
    assert row.tolist() == [0.5, 0.0, 0.5]


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 5.0]), min_size=1, max_size=20),
    uniform=st.one_of(
        st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True, width=32)
    ),
)
def test_a_token_without_probability_is_never_drawn(weights: list[float], uniform: float) -> None:
    if sum(weights) == 0:
        return
    assert weights[draw(np.array(weights, dtype=np.float32), uniform)] > 0


@pytest.mark.parametrize("vocab_size", [100, 8_193, 10_000, 151_936])
def test_ids_stay_below_the_vocabulary_of_any_size(vocab_size: int) -> None:
    row = probabilities(torch.zeros(vocab_size), SamplingParams()).numpy()
    assert draw(row, 1 - 2**-53) < vocab_size
    assert draw(row, 0.0) == 0


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_a_row_with_no_law_gives_no_token_at_all(weight: float) -> None:
    with pytest.raises(AssertionError):
        draw(np.full(4, weight), 0.5)


def test_a_draw_follows_the_inverse_of_the_cdf() -> None:
    probs = np.array([0.25, 0.0, 0.5, 0.25])
    assert [draw(probs, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999)] == [0, 0, 2, 2, 3, 3]


def test_a_sparse_row_is_the_head_of_the_row_renormalised() -> None:
    row = sparse_row(torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]), 2)
    assert row.token_ids.tolist() == [1, 3]
    assert row.probs == pytest.approx([4 / 7, 3 / 7])
    assert row.probs.dtype == np.float32
    assert {draw_from_row(row, u) for u in (0.0, 0.5, 0.6, 0.99)} == {1, 3}


def test_a_one_hot_row_stays_one_hot() -> None:
    row = sparse_row(torch.tensor([0.0, 1.0, 0.0]), 128)
    assert row.token_ids.tolist() == [1]
    assert row.probs.tolist() == [1.0]
