from headrace.gather import GatherWindow


def test_a_batch_with_everybody_starts_at_once() -> None:
    window = GatherWindow()
    window.expect("a")
    window.expect("b")
    assert window.wait_s({"a"}) > 0
    assert window.wait_s({"a", "b"}) == 0


def test_the_wait_is_a_share_of_what_a_batch_takes() -> None:
    window = GatherWindow(min_s=0.01, max_s=2.0)
    window.finished(1.0, ["a", "b"])
    assert 0.1 < window.wait_s({"a"}) < 1.0
    window.finished(1e6, ["a", "b"])
    assert window.wait_s({"a"}) == 2.0


def test_a_sequence_that_missed_a_batch_is_not_waited_for_again() -> None:
    window = GatherWindow()
    window.finished(1.0, ["a", "b"])
    window.started()
    window.finished(1.0, ["a"])
    assert window.wait_s({"a"}) == 0


def test_a_closed_sequence_is_not_waited_for() -> None:
    window = GatherWindow()
    window.finished(1.0, ["a", "b"])
    window.forget("b")
    assert window.wait_s({"a"}) == 0
