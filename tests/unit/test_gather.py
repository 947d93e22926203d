import pytest

from headrace.gather import GatherWindow, QuietWindow, ReturnWindow


@pytest.mark.parametrize("window", [QuietWindow(), ReturnWindow()], ids=["quiet", "return"])
def test_a_batch_with_everybody_starts_at_once(window: GatherWindow) -> None:
    window.expect("a", now_s=0.9)
    window.expect("b", now_s=0.9)
    window.arrived("a", now_s=1.0)
    assert window.deadline_s(began_s=1.0) > 1.0
    window.arrived("b", now_s=1.0)
    assert window.deadline_s(began_s=1.0) == 1.0


@pytest.mark.parametrize("window", [QuietWindow(), ReturnWindow()], ids=["quiet", "return"])
def test_a_closed_sequence_is_not_waited_for(window: GatherWindow) -> None:
    window.expect("a", now_s=0.0)
    window.forget("a")
    assert window.deadline_s(began_s=1.0) == 1.0


@pytest.mark.parametrize("window", [QuietWindow(), ReturnWindow()], ids=["quiet", "return"])
def test_a_sequence_that_missed_a_batch_is_not_waited_for_again(window: GatherWindow) -> None:
    window.finished(["a", "b"], batch_s=1.0, now_s=0.0)
    window.arrived("a", now_s=0.1)
    window.started()
    window.finished(["a"], batch_s=1.0, now_s=2.0)
    window.arrived("a", now_s=2.1)
    assert window.deadline_s(began_s=2.1) == 2.1


def test_the_draft_waits_while_sequences_keep_coming() -> None:
    window = QuietWindow(quiet_s=0.02, max_s=0.1)
    window.finished(["a", "b", "c"], batch_s=1.0, now_s=0.0)
    window.arrived("a", now_s=5.0)
    assert window.deadline_s(began_s=5.0) == pytest.approx(5.02)
    window.arrived("b", now_s=5.015)
    assert window.deadline_s(began_s=5.0) == pytest.approx(5.035)
    window.arrived("d", now_s=5.09)
    assert window.deadline_s(began_s=5.0) == pytest.approx(5.1)


def test_a_silence_at_the_draft_costs_a_share_of_its_batch_at_most() -> None:
    window = QuietWindow(quiet_s=0.02, max_s=0.1)
    window.finished(["a", "b"], batch_s=0.01, now_s=0.0)
    window.arrived("a", now_s=5.0)
    assert window.deadline_s(began_s=5.0) == pytest.approx(5.002)


def returning(window: ReturnWindow, *, return_s: float, batch_s: float) -> None:
    """Let one sequence go round until the window knows its times."""
    for turn in range(20):
        now_s = 100.0 * turn
        window.started()
        window.finished(["a"], batch_s=batch_s, now_s=now_s)
        window.arrived("a", now_s=now_s + return_s)


def test_the_target_waits_a_usual_return_for_those_on_the_way() -> None:
    window = ReturnWindow()
    returning(window, return_s=0.4, batch_s=2.0)
    window.finished(["a", "b"], batch_s=2.0, now_s=9_000.0)
    window.arrived("a", now_s=9_000.3)
    assert window.deadline_s(began_s=9_000.3) == pytest.approx(9_000.6, abs=0.06)


def test_the_target_never_waits_longer_than_a_batch_takes() -> None:
    window = ReturnWindow()
    returning(window, return_s=8.0, batch_s=2.0)
    window.finished(["a", "b"], batch_s=2.0, now_s=9_000.0)
    window.arrived("a", now_s=9_000.1)
    assert window.deadline_s(began_s=9_000.1) == pytest.approx(9_002.1, abs=0.02)


def test_a_return_that_missed_its_batch_is_measured_all_the_same() -> None:
    window = ReturnWindow()
    returning(window, return_s=0.01, batch_s=2.0)
    for turn in range(20):
        now_s = 10_000.0 + 100.0 * turn
        window.finished(["a"], batch_s=2.0, now_s=now_s)
        window.started()
        window.arrived("a", now_s=now_s + 1.0)
    window.finished(["a", "b"], batch_s=2.0, now_s=20_000.0)
    window.arrived("b", now_s=20_000.0)
    assert window.deadline_s(began_s=20_000.0) > 20_001.0
