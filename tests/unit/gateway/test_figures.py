import pytest

from gateway.figures import Figures, SweepTally
from headrace.types import StepTimings, Verdict


def _verdict(num_accepted: int, timings: StepTimings | None = None) -> Verdict:
    return Verdict(
        step_index=0,
        num_accepted=num_accepted,
        output_token_ids=tuple(range(num_accepted + 1)),
        timings=timings or StepTimings(),
    )


def _sweep(index: int, *, num_sweeps: int = 1) -> StepTimings:
    return StepTimings(
        sweep_index=index,
        num_sweeps=num_sweeps,
        bytes_streamed=100 * num_sweeps,
        sweep_ns=50 * num_sweeps,
        stall_ns=10 * num_sweeps,
    )


def test_a_sweep_that_two_sequences_report_counts_once() -> None:
    tally = SweepTally()
    for index in (1, 1, 2, 1, 2):
        tally.add(_sweep(index))
    assert (tally.num_sweeps, tally.bytes_streamed, tally.sweep_ns) == (2, 200, 100)


def test_a_prefill_over_several_sweeps_adds_only_the_new_ones() -> None:
    tally = SweepTally()
    tally.add(_sweep(5))
    tally.add(_sweep(7, num_sweeps=4))
    assert (tally.num_sweeps, tally.bytes_streamed, tally.stall_ns) == (4, 400, 40)


def test_a_step_without_a_sweep_adds_nothing() -> None:
    tally = SweepTally()
    tally.add(StepTimings())
    assert tally.num_sweeps == 0


def test_rates_follow_their_definitions() -> None:
    figures = Figures(prompt_tokens=3, max_gamma=4, start_s=10.0)
    for gamma, accepted, now_s in ((4, 4, 12.0), (4, 1, 13.0), (4, 0, 14.0), (0, 0, 15.0)):
        figures.add_step(
            gamma=gamma, verdict=_verdict(accepted), num_tokens=accepted + 1, now_s=now_s
        )
    summary = figures.summary()
    assert summary.completion_tokens == 9
    assert summary.acceptance_histogram == (1, 1, 0, 0, 1)
    assert summary.num_spec_steps == 3
    assert summary.num_accepted_tokens == 5
    assert summary.draft_acceptance_ratio == pytest.approx(5 / 12)
    # alpha = sum k / sum(k + [k < gamma])
    assert summary.acceptance_rate == pytest.approx(5 / (4 + 2 + 1))
    assert summary.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert summary.block_efficiency == pytest.approx(9 / 4)
    assert summary.ttft_s == pytest.approx(2.0)
    assert summary.tokens_per_s == pytest.approx(9 / 5)


def test_a_request_without_drafts_divides_by_nothing() -> None:
    summary = Figures(prompt_tokens=1, max_gamma=0, start_s=0.0).summary()
    assert summary.acceptance_rate == summary.draft_acceptance_ratio == 0.0
    assert summary.mean_acceptance_length == summary.block_efficiency == 1.0
