import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from headrace.acceptance import accept, residual
from headrace.errors import ShapeMismatch
from headrace.types import Proposal, SparseRow
from tests.support.exactness import Row, sparse

VOCAB_SIZE = 6


def rows(count: int) -> st.SearchStrategy[NDArray[np.float64]]:
    weights = hnp.arrays(
        np.float64, (count, VOCAB_SIZE), elements=st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
    )
    return weights.filter(lambda w: bool((w.sum(axis=1) > 0).all())).map(
        lambda w: w / w.sum(axis=1, keepdims=True)
    )


@given(data=st.data(), gamma=st.integers(0, 4), seed=st.integers(0, 2**64 - 1))
def test_what_comes_out_is_always_a_prefix_and_one_token(
    data: st.DataObject, gamma: int, seed: int
) -> None:
    targets, drafts = data.draw(rows(gamma + 1)), data.draw(rows(gamma))
    tokens = tuple(data.draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in drafts)
    proposal = Proposal(token_ids=tokens, draft_rows=tuple(map(sparse, drafts)))
    result = accept(proposal, targets.__getitem__, seed=seed, first_position=0)
    accepted = result.num_accepted
    assert 0 <= accepted <= gamma
    assert result.output_token_ids[:accepted] == tokens[:accepted]
    assert len(result.output_token_ids) == accepted + 1
    for index, token in enumerate(result.output_token_ids):
        assert targets[index][token] > 0, "a token that the target rules out never comes out"


@given(data=st.data(), seed=st.integers(0, 2**64 - 1))
def test_equal_rows_are_always_accepted(data: st.DataObject, seed: int) -> None:
    drafts = data.draw(rows(4))
    tokens = tuple(data.draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in drafts)
    proposal = Proposal(token_ids=tokens, draft_rows=tuple(map(sparse, drafts)))
    targets = [*drafts, drafts[0]]
    assert accept(proposal, targets.__getitem__, seed=seed, first_position=3).num_accepted == 4


@given(data=st.data())
def test_the_residual_is_a_distribution(data: st.DataObject) -> None:
    target, draft = data.draw(rows(2))
    left = residual(target, sparse(draft))
    assert left.sum() == pytest.approx(1.0)
    assert (left >= 0).all()


def test_rows_after_the_first_rejection_are_never_asked_for() -> None:
    asked = []

    def target_row(index: int) -> Row:
        asked.append(index)
        return np.array([0.0, 1.0])

    certain = sparse(np.array([1.0, 0.0]))
    proposal = Proposal(token_ids=(0, 0, 0), draft_rows=(certain,) * 3)
    result = accept(proposal, target_row, seed=0, first_position=0)
    assert result.output_token_ids == (1,)
    assert asked == [0]


def test_the_input_rows_stay_as_they_are() -> None:
    target = np.array([0.5, 0.5])
    residual(target, sparse(np.array([1.0, 0.0])))
    assert target.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("token_id", "ids"), [(1, [0]), (2, [2]), (0, [0, 7])], ids=["not its row's", "beyond", "row"]
)
def test_a_draft_token_must_come_from_its_row_and_the_vocabulary(
    token_id: int, ids: list[int]
) -> None:
    probs = np.full(len(ids), 1 / len(ids), dtype=np.float32)
    row = SparseRow(token_ids=np.array(ids), probs=probs)
    proposal = Proposal(token_ids=(token_id,), draft_rows=(row,))
    with pytest.raises(ShapeMismatch):
        accept(proposal, lambda _: np.array([0.5, 0.5]), seed=0, first_position=0)
