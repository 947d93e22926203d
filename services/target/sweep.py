"""One sweep: a batch of proposals through all layers, then acceptance. Runs on the compute thread.

Knows nothing of the wire.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace
from torch import Tensor

from headrace import telemetry
from headrace.acceptance import accept
from headrace.errors import HeadraceError
from headrace.model.batch_loop import Job
from headrace.model.engine import Engine, Slice
from headrace.sampling import probabilities
from headrace.types import Proposal, StepTimings, Verdict
from services.target.schedule import Load, plan_sweep
from services.target.weight_feed import WeightFeed


@dataclass(slots=True, kw_only=True, eq=False)
class VerifyJob(Job[Verdict]):
    """One proposal to check, and the time its sweeps took so far."""

    proposal: Proposal
    queue_ns: int = 0
    sweep_ns: int = 0
    stall_ns: int = 0
    bytes_streamed: int = 0
    num_sweeps: int = 0

    @property
    def load(self) -> Load:
        """What still has to travel."""
        return Load(num_pending=self.sequence.num_pending, gamma=self.proposal.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One job's share of a sweep."""

    job: VerifyJob
    num_tokens: int
    is_last: bool
    """Whether all of the job's tokens are in it, so that its verdict follows."""

    def slice(self) -> Slice:
        """The tokens of this part."""
        pending = self.job.sequence.pending_token_ids
        if not self.is_last:
            return Slice(
                kv=self.job.sequence.kv, token_ids=pending[: self.num_tokens], num_logits=0
            )
        return Slice(
            kv=self.job.sequence.kv,
            token_ids=[*pending, *self.job.proposal.token_ids],
            num_logits=self.job.proposal.gamma + 1,
        )


class Sweeper:
    """Runs sweeps of the target model."""

    def __init__(self, engine: Engine, feed: WeightFeed | None, *, max_sweep_tokens: int) -> None:
        """Prepare to sweep.

        Args:
            engine: The target model.
            feed: Where its weights come from; None when all are resident.
            max_sweep_tokens: Token positions in one sweep.
        """
        self._engine = engine
        self._feed = feed
        self._max_sweep_tokens = max_sweep_tokens
        self._num_sweeps = 0

    def run(self, jobs: Sequence[VerifyJob]) -> None:
        """Advance some of the jobs by one sweep; those that are through get their verdict.

        Raises:
            HeadraceError: The weights cannot be had; no job has advanced.
        """
        takes = plan_sweep([job.load for job in jobs], max_tokens=self._max_sweep_tokens)
        parts = [
            _Part(job=job, num_tokens=take, is_last=take == job.load.num_tokens)
            for job, take in zip(jobs, takes, strict=True)
            if take
        ]
        logits = self._forward(parts)
        for part, rows in zip(parts, logits, strict=True):
            if part.is_last:
                self._judge(part.job, rows, parts)

    def _forward(self, parts: Sequence[_Part]) -> list[Tensor]:
        """[gamma + 1, V] for each part that is its job's last, [0, V] for the others."""
        self._num_sweeps += 1
        began_ns = time.perf_counter_ns()
        stall_ns, bytes_streamed = self._counters()
        with self._spans(parts) as spans:
            if self._feed is not None:
                self._feed.begin_sweep(self._num_sweeps, _traceparents(spans))
            logits = self._engine.forward([part.slice() for part in parts])
            if self._feed is not None:
                self._feed.end_sweep(self._num_sweeps)
            sweep_ns = time.perf_counter_ns() - began_ns
            stalled_ns, streamed = self._counters()
            stall_ns, bytes_streamed = stalled_ns - stall_ns, streamed - bytes_streamed
            for span in spans:
                span.set_attribute(telemetry.BYTES_STREAMED, bytes_streamed)
                span.set_attribute(telemetry.STALL_NS, stall_ns)
                span.set_attribute(telemetry.FORWARD_NS, sweep_ns - stall_ns)
        for part in parts:
            job = part.job
            if job.num_sweeps == 0:
                job.queue_ns = began_ns - job.submitted_ns
            job.num_sweeps += 1
            job.sweep_ns += sweep_ns
            job.stall_ns += stall_ns
            job.bytes_streamed += bytes_streamed
        return logits

    def _judge(self, job: VerifyJob, rows: Tensor, parts: Sequence[_Part]) -> None:
        """Give a job its verdict and leave its sequence with exactly the committed KV."""
        sequence = job.sequence
        length = len(sequence.token_ids)
        began_ns = time.perf_counter_ns()
        try:
            with telemetry.tracer().start_as_current_span(
                telemetry.SPAN_ACCEPT, context=job.context
            ) as span:
                acceptance = accept(
                    job.proposal,
                    lambda index: probabilities(rows[index], sequence.sampling).numpy(),
                    seed=sequence.sampling.seed,
                    first_position=length,
                )
                span.set_attribute(telemetry.NUM_ACCEPTED, acceptance.num_accepted)
        except HeadraceError as error:
            sequence.kv.truncate(length - 1)
            job.error = error
            return
        sequence.kv.truncate(length + acceptance.num_accepted)
        sequence.token_ids.extend(acceptance.output_token_ids)
        job.answer = Verdict(
            step_index=job.step_index,
            num_accepted=acceptance.num_accepted,
            output_token_ids=acceptance.output_token_ids,
            timings=StepTimings(
                queue_ns=job.queue_ns,
                sweep_ns=job.sweep_ns,
                stall_ns=job.stall_ns,
                forward_ns=job.sweep_ns - job.stall_ns,
                accept_ns=time.perf_counter_ns() - began_ns,
                bytes_streamed=job.bytes_streamed,
                num_sweeps=job.num_sweeps,
                num_sequences=len(parts),
                num_tokens=sum(part.num_tokens for part in parts),
                sweep_index=self._num_sweeps,
            ),
        )
        sequence.last_step_index = job.step_index
        sequence.last_answer = job.answer

    def _counters(self) -> tuple[int, int]:
        return (0, 0) if self._feed is None else (self._feed.stall_ns, self._feed.bytes_streamed)

    @contextmanager
    def _spans(self, parts: Sequence[_Part]) -> Iterator[list[trace.Span]]:
        """One sweep span in the trace of every request that takes part."""
        attributes = {
            telemetry.SWEEP_INDEX: self._num_sweeps,
            telemetry.NUM_SEQUENCES: len(parts),
            telemetry.NUM_TOKENS: sum(part.num_tokens for part in parts),
        }
        spans = [
            telemetry.tracer().start_span(
                telemetry.SPAN_SWEEP, context=part.job.context, attributes=attributes
            )
            for part in parts
        ]
        try:
            yield spans
        except HeadraceError as error:
            for span in spans:
                span.set_attribute(telemetry.ERROR_TYPE, type(error).__name__)
                span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            for span in spans:
                span.end()


def _traceparents(spans: Sequence[trace.Span]) -> list[str]:
    values = [telemetry.traceparent(trace.set_span_in_context(span)) for span in spans]
    return [value for value in values if value is not None]
