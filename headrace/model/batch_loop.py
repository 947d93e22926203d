"""Batches the pending steps of live sequences: join and leave between any two batches.

Calls come in on the event loop; the compute runs on one thread of its own, so that health checks
always answer. Knows nothing of what a batch computes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from opentelemetry import context as otel_context

from headrace.errors import HeadraceError, RequestCancelled, StaleStep
from headrace.gather import GatherWindow
from headrace.model.compute_thread import ComputeThread
from headrace.model.sequences import LiveSequence, SequenceTable
from headrace.types import SamplingParams

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_IDLE_CHECK_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job(Generic[Answer]):
    """One step of one sequence, until it has an answer or an error."""

    sequence: LiveSequence[Answer]
    step_index: int
    context: otel_context.Context = field(default_factory=otel_context.get_current)
    """Trace context of the call."""
    submitted_ns: int = field(default_factory=time.perf_counter_ns)
    answer: Answer | None = None
    error: HeadraceError | None = None

    @property
    def is_done(self) -> bool:
        """Whether a batch has finished it."""
        return self.answer is not None or self.error is not None


AnyJob = TypeVar("AnyJob", bound=Job)  # type: ignore[type-arg]


class BatchLoop(Generic[AnyJob, Answer]):
    """Runs batches for as long as jobs are pending."""

    def __init__(
        self,
        table: SequenceTable[Answer],
        run_batch: Callable[[Sequence[AnyJob]], None],
        *,
        window: GatherWindow,
        compute: ComputeThread,
        max_idle_s: float = 600.0,
    ) -> None:
        """Prepare a loop; `run` starts it.

        Args:
            table: The live sequences.
            run_batch: Computes on the compute thread and gives jobs an answer or an error; a job
                that gets neither stays pending for the next batch.
            window: Decides how long a batch waits for more sequences.
            compute: Where run_batch runs.
            max_idle_s: A sequence that nobody used for so long is closed: its gateway is gone.
        """
        self._table = table
        self._run_batch = run_batch
        self._max_idle_s = max_idle_s
        self._window = window
        self._pending: dict[str, tuple[AnyJob, asyncio.Future[Answer]]] = {}
        self._changed = asyncio.Event()
        self._running: frozenset[str] = frozenset()
        self._between_batches = asyncio.Condition()
        self._compute = compute

    async def open(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        max_length: int,
    ) -> None:
        """Register a sequence; see SequenceTable.open."""
        await self._leave(sequence_id)
        self._table.open(
            sequence_id, token_ids, sampling, max_length=max_length, now_s=time.monotonic()
        )
        self._window.expect(sequence_id, now_s=time.monotonic())

    async def close(self, sequence_id: str) -> None:
        """Free a sequence; its pending step fails."""
        await self._leave(sequence_id)
        self._table.close(sequence_id)

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse token ids outside the vocabulary."""
        self._table.check_token_ids(token_ids)

    async def step(
        self,
        sequence_id: str,
        step_index: int,
        make_job: Callable[[LiveSequence[Answer]], AnyJob],
    ) -> Answer:
        """The answer to one step, after the batch that finishes it.

        The last step again gets the same answer again; a step that is under way is joined. A caller
        that is cancelled leaves the step running.

        Args:
            sequence_id: An open sequence.
            step_index: Number of the step.
            make_job: Checks the step against the sequence, which rests meanwhile.

        Raises:
            UnknownSequence: The sequence is not open.
            StaleStep: A step before the last one.
            HeadraceError: What make_job or the batch raised.
        """
        while (pending := self._pending.get(sequence_id)) is not None:
            if pending[0].step_index == step_index:
                return await asyncio.shield(pending[1])
            await self._leave(sequence_id)
        sequence = self._table.get(sequence_id, now_s=time.monotonic())
        if step_index <= sequence.last_step_index:
            if step_index == sequence.last_step_index and sequence.last_answer is not None:
                return sequence.last_answer
            raise StaleStep(f"step {step_index} is committed already")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._pending[sequence_id] = (make_job(sequence), future)
        self._window.arrived(sequence_id, now_s=time.monotonic())
        self._changed.set()
        return await asyncio.shield(future)

    async def run(self) -> None:
        """Run batches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._close_idle())
            while True:
                await self._gather()
                await self._run_one()

    async def _gather(self) -> None:
        while not self._pending:
            self._changed.clear()
            await self._changed.wait()
        began_s = time.monotonic()
        while True:
            left_s = self._window.deadline_s(began_s=began_s) - time.monotonic()
            if left_s <= 0:
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def _run_one(self) -> None:
        jobs = [job for job, _ in self._pending.values()]
        if not jobs:
            return
        self._window.started()
        self._running = frozenset(self._pending)
        began_s = time.monotonic()
        try:
            await self._compute.run(self._run_batch, jobs)
        except HeadraceError as error:
            logger.warning("a batch failed: %s", error.message)
            _fail_all(jobs, error)
        except Exception:
            logger.exception("unexpected error in a batch")
            _fail_all(jobs, HeadraceError("internal error; see this process's log"))
        finally:
            self._running = frozenset()
        self._answer(jobs, batch_s=time.monotonic() - began_s)
        async with self._between_batches:
            self._between_batches.notify_all()

    def _answer(self, jobs: Sequence[AnyJob], *, batch_s: float) -> None:
        answered = []
        for job in jobs:
            sequence_id = job.sequence.sequence_id
            pending = self._pending.get(sequence_id)
            if not job.is_done or pending is None or pending[0] is not job:
                continue
            del self._pending[sequence_id]
            answered.append(sequence_id)
            if pending[1].done():
                continue
            if job.error is not None:
                pending[1].set_exception(job.error)
            else:
                pending[1].set_result(cast("Answer", job.answer))
        self._window.finished(answered, batch_s=batch_s, now_s=time.monotonic())

    async def _leave(self, sequence_id: str) -> None:
        """Take a sequence out of the pending ones; waits while a batch computes with its KV."""
        self._window.forget(sequence_id)
        self._changed.set()
        self._fail(sequence_id, "the sequence was closed")
        async with self._between_batches:
            await self._between_batches.wait_for(lambda: sequence_id not in self._running)

    def _fail(self, sequence_id: str, reason: str) -> None:
        pending = self._pending.pop(sequence_id, None)
        if pending is not None and not pending[1].done():
            pending[1].set_exception(RequestCancelled(reason))

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_CHECK_S)
            for sequence_id in self._table.idle_since(time.monotonic() - self._max_idle_s):
                if sequence_id not in self._pending:
                    logger.info("closing a sequence that nobody used for %.0f s", self._max_idle_s)
                    await self.close(sequence_id)


def _fail_all(jobs: Sequence[AnyJob], error: HeadraceError) -> None:
    for job in jobs:
        if not job.is_done:
            job.error = error


def _retrieve(future: asyncio.Future[Answer]) -> None:
    """Mark the exception as seen: its caller may be gone."""
    if not future.cancelled():
        future.exception()
