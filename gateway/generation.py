"""The life of one request: wait for a turn, run a step loop for each choice, sum up, end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode

from gateway.admission import Admission
from gateway.drafter import Drafter
from gateway.events import Delta, Event
from gateway.feed import Feed
from gateway.figures import Figures
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.sequence import Sequence
from gateway.spec import GenerationSpec
from gateway.speculation import speculate
from gateway.store import Status, Store
from gateway.task_group import task_group
from gateway.tokenizer import Tokenizer
from gateway.verifier import Verifier
from headrace import telemetry
from headrace.errors import DeadlineExceeded, HeadraceError, RequestCancelled
from headrace.rng import choice_seed
from headrace.rpc.deadline import deadline_after
from headrace.types import Verdict

logger = logging.getLogger(__name__)

_MAX_UNREAD_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What every generation works with."""

    model_name: str
    tokenizer: Tokenizer
    models: Models
    store: Store
    admission: Admission
    metrics: Metrics
    open_sequences: set[Sequence] = field(default_factory=set)
    """Those that hold KV at the target."""

    def kv_usage(self) -> float:
        """Share of the target's KV positions that committed tokens take."""
        num_tokens = sum(len(sequence.token_ids) for sequence in self.open_sequences)
        return num_tokens / self.models.target_info.kv_capacity_tokens


class Generation:
    """One request. Iterate over it for its events; the last one is the Summary."""

    def __init__(self, spec: GenerationSpec, backend: Backend, *, request_id: str) -> None:
        """Prepare; nothing happens before `start`.

        Args:
            spec: The request.
            backend: What it works with.
            request_id: Unguessable: whoever knows it can cancel the request.
        """
        self.spec = spec
        self.request_id = request_id
        self.created_s = int(time.time())
        self._backend = backend
        self._sequences = [self._sequence(index) for index in range(spec.num_choices)]
        self._figures = Figures(
            prompt_tokens=len(spec.prompt_token_ids),
            max_gamma=spec.gamma,
            start_s=time.monotonic(),
        )
        self._feed = Feed(max_events=_MAX_UNREAD_EVENTS)
        self._task: asyncio.Task[None] | None = None
        self._cancel_reason: HeadraceError | None = None
        self._has_ended = False

    @property
    def sequence_ids(self) -> list[str]:
        """One for each choice."""
        return [sequence.sequence_id for sequence in self._sequences]

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._feed.__aiter__()

    def start(self, group: asyncio.TaskGroup, *, timeout_s: float) -> "asyncio.Task[None]":
        """Run in a task of its own, which never raises: the reader gets the errors."""
        self._task = group.create_task(self._run(timeout_s))
        # A task that is cancelled before its first step never enters _run.
        self._task.add_done_callback(lambda _: self._end(self._cancellation()))
        return self._task

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """End it within one step; a request that has ended stays as it is."""
        if self._task is not None and not self._has_ended:
            self._cancel_reason = reason or RequestCancelled("the request was cancelled")
            self._task.cancel()

    async def _run(self, timeout_s: float) -> None:
        error: HeadraceError | None = None
        try:
            await self._run_within(timeout_s)
        except asyncio.CancelledError:
            error = self._cancellation()
        except HeadraceError as caught:
            error = caught
        except Exception:
            logger.exception("unexpected error in a request")
            error = HeadraceError("internal error; see the gateway's log")
        self._end(error)
        await self._record_end(error)

    def _end(self, error: HeadraceError | None) -> None:
        """Tell the reader, once; from here on only the end is being recorded."""
        if self._has_ended:
            return
        self._has_ended = True
        for sequence_id in self.sequence_ids:
            self._backend.admission.leave(sequence_id)
        if error is not None:
            self._backend.metrics.observe_failure(error)
        self._feed.end(error)

    def _cancellation(self) -> HeadraceError:
        return self._cancel_reason or RequestCancelled("the gateway stopped")

    async def _run_within(self, timeout_s: float) -> None:
        with deadline_after(timeout_s), self._span() as span:
            try:
                await self._run_choices(timeout_s)
                await self._sum_up(span)
            except BaseException as error:
                span.set_attribute(telemetry.ERROR_TYPE, type(error).__name__)
                span.set_status(StatusCode.ERROR)
                raise

    async def _run_choices(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), task_group() as group:
                for sequence in self._sequences:
                    group.create_task(self._run_choice(sequence))
        except TimeoutError:
            raise DeadlineExceeded("the request's time is over") from None

    async def _sum_up(self, span: Span) -> None:
        summary = self._figures.summary()
        self._backend.metrics.observe_success(summary)
        reasons = [sequence.finish_reason or "" for sequence in self._sequences]
        span.set_attribute(telemetry.GEN_AI_RESPONSE_FINISH_REASONS, reasons)
        span.set_attribute(telemetry.GEN_AI_USAGE_INPUT_TOKENS, summary.prompt_tokens)
        span.set_attribute(telemetry.GEN_AI_USAGE_OUTPUT_TOKENS, summary.completion_tokens)
        await self._feed.put(summary)

    async def _run_choice(self, sequence: Sequence) -> None:
        backend = self._backend
        await backend.admission.turn(sequence.sequence_id)
        backend.open_sequences.add(sequence)
        clock = _ChoiceClock()

        async def commit(delta: Delta) -> None:
            await backend.store.commit(self.request_id, delta)

        async def publish(delta: Delta, gamma: int, verdict: Verdict) -> None:
            now_s = time.monotonic()
            num_tokens = len(delta.token_ids)
            self._figures.add_step(gamma=gamma, verdict=verdict, num_tokens=num_tokens, now_s=now_s)
            backend.metrics.observe_step(
                gamma=gamma, verdict=verdict, num_tokens=num_tokens, gap_s=clock.tick(now_s)
            )
            await self._feed.put(delta)

        try:
            await speculate(
                sequence,
                drafter=self._drafter(sequence),
                verifier=Verifier(backend.models.target, sequence),
                commit=commit,
                publish=publish,
            )
        finally:
            backend.open_sequences.discard(sequence)
            backend.admission.leave(sequence.sequence_id)
        backend.metrics.observe_choice(
            finish_reason=sequence.finish_reason or "",
            num_tokens=len(sequence.token_ids) - len(self.spec.prompt_token_ids),
            decode_s=clock.decode_s,
        )

    def _sequence(self, index: int) -> Sequence:
        sampling = self.spec.sampling
        return Sequence(
            self.spec,
            sequence_id=f"{self.request_id}/{index}",
            index=index,
            sampling=replace(sampling, seed=choice_seed(sampling.seed, index)),
            decode=self._backend.tokenizer.decode,
            eos_token_ids=self._backend.tokenizer.eos_token_ids,
        )

    def _drafter(self, sequence: Sequence) -> Drafter | None:
        draft, info = self._backend.models.draft, self._backend.models.draft_info
        if draft is None or info is None or self.spec.gamma == 0:
            return None
        return Drafter(draft, sequence, max_context_tokens=info.max_context_tokens)

    def _span(self) -> AbstractContextManager[Span]:
        sampling = self.spec.sampling
        return telemetry.tracer().start_as_current_span(
            telemetry.SPAN_REQUEST,
            kind=trace.SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
            attributes={
                telemetry.GEN_AI_OPERATION_NAME: self.spec.operation,
                telemetry.GEN_AI_PROVIDER_NAME: "headrace",
                telemetry.GEN_AI_REQUEST_MODEL: self._backend.model_name,
                telemetry.GEN_AI_REQUEST_MAX_TOKENS: self.spec.max_tokens,
                telemetry.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                telemetry.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                telemetry.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                telemetry.GEN_AI_REQUEST_CHOICE_COUNT: self.spec.num_choices,
                telemetry.GEN_AI_RESPONSE_ID: self.request_id,
                telemetry.GEN_AI_RESPONSE_MODEL: self._backend.model_name,
                telemetry.GAMMA: self.spec.gamma,
            },
        )

    async def _record_end(self, error: HeadraceError | None) -> None:
        status: Status = "finished"
        if error is not None:
            status = "cancelled" if isinstance(error, RequestCancelled) else "failed"
        try:
            await self._backend.store.finish(self.request_id, status)
        except HeadraceError as caught:
            # Its keys expire by themselves; the reader has the outcome already.
            logger.warning("could not record the end of a request: %s", caught.message)


class _ChoiceClock:
    """When the steps of one choice ended."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0

    def tick(self, now_s: float) -> float | None:
        """Seconds since the step before; None for the first step."""
        gap_s = None if self._first_s is None else now_s - self._last_s
        self._first_s = now_s if self._first_s is None else self._first_s
        self._last_s = now_s
        return gap_s

    @property
    def decode_s(self) -> float:
        """From the first step's end to the last one's."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s
