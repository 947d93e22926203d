import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batcher import Batcher
from headrace.errors import InvalidRequest, QueueFull


def test_sequences_beyond_the_limit_wait_their_turn_in_order() -> None:
    batcher = Batcher(max_live=2, max_waiting=4)
    assert batcher.enter(["a", "b", "c"]) == ["a", "b"]
    assert batcher.enter(["d"]) == []
    assert batcher.leave("a") == ["c"]
    assert batcher.leave("b") == ["d"]


def test_a_request_enters_whole_or_not_at_all() -> None:
    batcher = Batcher(max_live=1, max_waiting=1)
    batcher.enter(["a"])
    with pytest.raises(QueueFull):
        batcher.enter(["b", "c"])
    assert (batcher.num_live, batcher.num_waiting) == (1, 0)


def test_a_request_that_can_never_fit_is_told_so() -> None:
    with pytest.raises(InvalidRequest):
        Batcher(max_live=1, max_waiting=1).enter(["a", "b", "c"])


def test_a_waiting_sequence_can_leave() -> None:
    batcher = Batcher(max_live=1, max_waiting=2)
    batcher.enter(["a", "b", "c"])
    batcher.leave("b")
    assert batcher.leave("a") == ["c"]
    assert batcher.leave("unknown") == []


@given(st.lists(st.one_of(st.integers(1, 3), st.just("leave")), max_size=40))
def test_limits_hold_and_nobody_is_overtaken(actions: list[int | str]) -> None:
    batcher = Batcher(max_live=3, max_waiting=4)
    entered: list[str] = []
    promoted: list[str] = []
    live: list[str] = []
    for action in actions:
        new: list[str] = []
        if isinstance(action, int):
            wanted = [f"s{len(entered) + i}" for i in range(action)]
            try:
                new = batcher.enter(wanted)
            except QueueFull:
                continue
            entered += wanted
        elif live:
            new = batcher.leave(live.pop(0))
        live += new
        promoted += new
        assert batcher.num_live == len(live) <= 3
        assert batcher.num_waiting == len(entered) - len(promoted) <= 4
        assert batcher.num_waiting == 0 or batcher.num_live == 3
    assert promoted == entered[: len(promoted)]
