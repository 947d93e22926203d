"""The figures of one answer."""

from headrace.cli.chat import Answer
from headrace.cli.figures import as_object, figures_line

HEADRACE = {
    "sweeps": 20,
    "bytes_streamed": 4_240_000_000,
    "tokens_per_s": 12.34,
    "ttft_s": 0.418,
    "block_efficiency": 2.051,
    "acceptance_rate": 0.5249,
    "stream_gb_per_s": 1.943,
}


def make_answer(num_draft_tokens: int = 80, **changes: float) -> Answer:
    metrics = {
        "speculative_decoding": {"num_draft_tokens": num_draft_tokens},
        "headrace": {**HEADRACE, **changes},
    }
    usage = {"completion_tokens": 41}
    return Answer(text="Paris.", finish_reason="stop", usage=usage, metrics=metrics)


def test_the_line_holds_every_figure() -> None:
    assert figures_line(make_answer()) == (
        "41 tokens | 12.3 tokens/s | TTFT 0.42 s | block efficiency 2.05 | "
        "acceptance rate 0.52 | 1.94 GB/s"
    )


def test_plain_decoding_and_resident_weights_leave_out_what_was_not_measured() -> None:
    assert figures_line(make_answer(num_draft_tokens=0, bytes_streamed=0)) == (
        "41 tokens | 12.3 tokens/s | TTFT 0.42 s | block efficiency 2.05"
    )


def test_an_acceptance_rate_of_zero_is_a_figure() -> None:
    assert "acceptance rate 0.00" in figures_line(make_answer(acceptance_rate=0.0))


def test_another_server_without_metrics_still_gets_a_line() -> None:
    assert figures_line(Answer(usage={"completion_tokens": 5})) == "5 tokens"


def test_the_object_holds_text_usage_and_metrics() -> None:
    answer = make_answer()
    assert as_object(answer) == {
        "text": "Paris.",
        "finish_reason": "stop",
        "usage": {"completion_tokens": 41},
        "metrics": answer.metrics,
    }
