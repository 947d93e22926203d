"""Continuous batching: requests together against the same requests one by one.

    python benchmarks/batching.py [--target demo] [--draft demo] [--requests 8] [--tokens 64]

A sweep's price hardly depends on how many sequences it carries, so with a target that is bound by
the disk, N requests together should take little longer than one. Prints tokens/s both ways, their
ratio, and the mean number of sequences in a sweep while all requests are live. Speed is that ratio
in one run; tokens/s alone depends on the disk of the day.
"""

import argparse
import asyncio
import json
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from headrace import telemetry
from headrace.catalog.resolve import model_path
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.running_stack import running_stack

_SETTLE_S = 3.0
"""For the last spans to arrive."""
_PROMPT = "Write a long story about a mill that is driven by a river."


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some requests and how long they took together."""

    trace_ids: list[str]
    num_tokens: int
    duration_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests over the whole time."""
        return self.num_tokens / self.duration_s


async def run_round(client: httpx.AsyncClient, count: int, tokens: int, gamma: int) -> Round:
    """Send count requests at once and wait for all of them."""
    trace_ids = [secrets.token_hex(16) for _ in range(count)]
    began_s = time.monotonic()
    responses = await asyncio.gather(
        *(
            client.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": _PROMPT}],
                    "max_tokens": tokens,
                    "temperature": 0.7,
                    "seed": index,
                    "gamma": gamma,
                    "ignore_eos": True,
                },
                headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
            )
            for index, trace_id in enumerate(trace_ids)
        )
    )
    duration_s = time.monotonic() - began_s
    num_tokens = sum(
        response.raise_for_status().json()["usage"]["completion_tokens"] for response in responses
    )
    return Round(trace_ids=trace_ids, num_tokens=num_tokens, duration_s=duration_s)


def sequences_per_sweep(receiver: OtlpReceiver, trace_ids: list[str]) -> float:
    """Mean over the sweeps between the last request's first and the first request's last."""
    by_trace: list[list[ReceivedSpan]] = [
        [span for span in receiver.spans(trace_id) if span.name == telemetry.SPAN_SWEEP]
        for trace_id in trace_ids
    ]
    begin_ns = max(min(span.start_ns for span in spans) for spans in by_trace)
    end_ns = min(max(span.end_ns for span in spans) for spans in by_trace)
    sizes = {
        span.attributes[telemetry.SWEEP_INDEX]: span.attributes[telemetry.NUM_SEQUENCES]
        for spans in by_trace
        for span in spans
        if span.start_ns >= begin_ns and span.end_ns <= end_ns
    }
    return float(sum(sizes.values()) / len(sizes))


async def measure(base_url: str, receiver: OtlpReceiver, arguments: argparse.Namespace) -> None:
    """Run both ways and print the figures."""
    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:
        await run_round(client, 1, 4, arguments.gamma)  # warm up
        alone = [
            await run_round(client, 1, arguments.tokens, arguments.gamma)
            for _ in range(arguments.requests)
        ]
        together = await run_round(client, arguments.requests, arguments.tokens, arguments.gamma)
    await asyncio.sleep(_SETTLE_S)
    alone_tokens_per_s = sum(r.num_tokens for r in alone) / sum(r.duration_s for r in alone)
    row = {
        "requests": arguments.requests,
        "tokens": arguments.tokens,
        "gamma": arguments.gamma,
        "tokens_per_s_one_by_one": round(alone_tokens_per_s, 2),
        "tokens_per_s_together": round(together.tokens_per_s, 2),
        "ratio": round(together.tokens_per_s / alone_tokens_per_s, 2),
        "sequences_per_sweep": round(sequences_per_sweep(receiver, together.trace_ids), 2),
    }
    print(json.dumps(row))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(row, indent=2))


def main() -> None:
    """Start a stack, measure, stop it."""
    parser = argparse.ArgumentParser(description="Requests together against one by one.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    target, draft = model_path(arguments.target), model_path(arguments.draft)
    with tempfile.TemporaryDirectory() as directory, otlp_receiver() as receiver:
        log = Path(directory) / "serve.log"
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }
        with running_stack(target, draft, log, environment=environment) as stack:
            asyncio.run(measure(stack.base_url, receiver, arguments))


if __name__ == "__main__":
    main()
