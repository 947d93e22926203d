"""The figures of one answer, for people and for programs. Pure."""

from typing import Any

from headrace.cli.chat import Answer


def figures_line(answer: Answer) -> str:
    """One line: "41 tokens | 12.3 tokens/s | ..."; the gateway's `metrics` hold the figures.

    Left out: the acceptance rate of plain decoding, the bandwidth of resident weights, and what a
    server that is not ours does not report.
    """
    headrace = answer.metrics.get("headrace", {})
    speculation = answer.metrics.get("speculative_decoding", {})
    shown = {
        "tokens_per_s": "{:.1f} tokens/s",
        "ttft_s": "TTFT {:.2f} s",
        "block_efficiency": "block efficiency {:.2f}",
    }
    if speculation.get("num_draft_tokens"):
        shown["acceptance_rate"] = "acceptance rate {:.2f}"
    if headrace.get("bytes_streamed"):
        shown["stream_gb_per_s"] = "{:.2f} GB/s"
    figures = [form.format(headrace[name]) for name, form in shown.items() if name in headrace]
    return " | ".join([f"{answer.usage.get('completion_tokens', 0)} tokens", *figures])


def as_object(answer: Answer) -> dict[str, Any]:
    """What `run --json` prints."""
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "metrics": answer.metrics,
    }
