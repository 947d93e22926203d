"""What Prometheus scrapes. Names after the prefix follow vLLM's, so that its dashboards fit."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.events import Summary
from gateway.figures import SweepTally
from headrace.errors import HeadraceError
from headrace.types import Verdict

# Streamed targets are slow: the upper ends go beyond what resident models need.
_REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.75, 1, 2.5, 5, 10, 20, 40, 80)


class Metrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._sweeps = SweepTally()
        counter, histogram = self._counter, self._histogram

        self._drafts = counter("spec_decode_num_drafts", "Proposals checked")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens checked")
        self._accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that survived the test"
        )
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by position", "position"
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = counter("generation_tokens", "Committed output tokens")
        self._success = counter("request_success", "Finished choices", "finished_reason")
        self._failure = counter("request_failure", "Failed requests", "error")
        self._streamed_bytes = counter("streamed_bytes", "Weight bytes read from storage")
        self._stall_s = counter("sweep_stall_seconds", "Sweep time spent waiting for layers")
        self._ttft_s = histogram(
            "time_to_first_token_seconds", "From acceptance to first token", _REQUEST_BUCKETS_S
        )
        self._e2e_s = histogram(
            "e2e_request_latency_seconds", "From acceptance to last token", _REQUEST_BUCKETS_S
        )
        self._itl_s = histogram(
            "inter_token_latency_seconds", "Between the blocks of a choice", _TOKEN_BUCKETS_S
        )
        self._tpot_s = histogram(
            "time_per_output_token_seconds", "Mean per token after the first", _TOKEN_BUCKETS_S
        )

    def track(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge that is read when it is scraped."""
        gauge = Gauge(f"headrace:{name}", help_text, list(self._labels), registry=self._registry)
        gauge.labels(**self._labels).set_function(value)

    def observe_step(
        self, *, gamma: int, verdict: Verdict, num_tokens: int, gap_s: float | None
    ) -> None:
        """Count one step.

        Args:
            gamma: Draft tokens that were proposed.
            verdict: The target's answer.
            num_tokens: Tokens of it that were committed.
            gap_s: Since the choice's previous step; None for its first.
        """
        self._generation_tokens.labels(**self._labels).inc(num_tokens)
        if gap_s is not None:
            self._itl_s.labels(**self._labels).observe(gap_s)
        if gamma > 0:
            self._drafts.labels(**self._labels).inc()
            self._draft_tokens.labels(**self._labels).inc(gamma)
            self._accepted_tokens.labels(**self._labels).inc(verdict.num_accepted)
        for position in range(verdict.num_accepted):
            self._accepted_per_pos.labels(**self._labels, position=position).inc()
        bytes_before, stall_before_ns = self._sweeps.bytes_streamed, self._sweeps.stall_ns
        self._sweeps.add(verdict.timings)
        new_bytes = self._sweeps.bytes_streamed - bytes_before
        new_stall_ns = self._sweeps.stall_ns - stall_before_ns
        self._streamed_bytes.labels(**self._labels).inc(new_bytes)
        self._stall_s.labels(**self._labels).inc(new_stall_ns / 1e9)

    def observe_choice(self, *, finish_reason: str, num_tokens: int, decode_s: float) -> None:
        """Count one finished choice.

        Args:
            finish_reason: "stop" or "length".
            num_tokens: Its output tokens.
            decode_s: From its first step's end to its last one's.
        """
        self._success.labels(**self._labels, finished_reason=finish_reason).inc()
        if num_tokens > 1:
            self._tpot_s.labels(**self._labels).observe(decode_s / (num_tokens - 1))

    def observe_success(self, summary: Summary) -> None:
        """Count one finished request."""
        self._prompt_tokens.labels(**self._labels).inc(summary.prompt_tokens)
        self._ttft_s.labels(**self._labels).observe(summary.ttft_s)
        self._e2e_s.labels(**self._labels).observe(summary.duration_s)

    def observe_failure(self, error: HeadraceError) -> None:
        """Count one request that was refused or did not finish."""
        self._failure.labels(**self._labels, error=type(error).__name__).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        names = [*self._labels, *labels]
        return Counter(f"headrace:{name}", help_text, names, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"headrace:{name}",
            help_text,
            list(self._labels),
            buckets=buckets,
            registry=self._registry,
        )
