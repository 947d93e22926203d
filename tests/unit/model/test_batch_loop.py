import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import torch

from headrace.errors import HeadraceError, KVExhausted, RequestCancelled, StaleStep, UnknownSequence
from headrace.gather import ReturnWindow
from headrace.model.batch_loop import BatchLoop, Job
from headrace.model.compute_thread import ComputeThread
from headrace.model.device import CPU
from headrace.model.kv_cache import KVCache, LayerKVShape
from headrace.model.sequences import SequenceTable
from headrace.types import SamplingParams

IntJob = Job[int]
Loop = BatchLoop[IntJob, int]


@asynccontextmanager
async def running(run_batch: Callable[[Sequence[IntJob]], None]) -> AsyncIterator[Loop]:
    shape = LayerKVShape(num_heads=1, key_dim=1, value_dim=1)
    cache = KVCache([shape], num_blocks=16, block_size=1, dtype=torch.float32, device=CPU)
    table: SequenceTable[int] = SequenceTable(cache, vocab_size=10, max_context_tokens=16)
    loop: Loop = BatchLoop(table, run_batch, window=ReturnWindow(), compute=ComputeThread(1))
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def open_sequence(loop: Loop, sequence_id: str, max_length: int = 4) -> None:
    await loop.open(sequence_id, [1], SamplingParams(), max_length=max_length)


async def step(loop: Loop, sequence_id: str, step_index: int) -> int:
    return await loop.step(
        sequence_id, step_index, lambda s: IntJob(sequence=s, step_index=step_index)
    )


def finish(job: IntJob, answer: int) -> None:
    job.answer = answer
    job.sequence.last_step_index = job.step_index
    job.sequence.last_answer = answer


def count_batch(jobs: Sequence[IntJob]) -> None:
    for job in jobs:
        finish(job, len(jobs))


async def test_sequences_that_are_live_together_share_every_batch() -> None:
    async with running(count_batch) as loop:
        for name in "abcd":
            await open_sequence(loop, name)
        for index in range(5):
            assert await asyncio.gather(*(step(loop, name, index) for name in "abcd")) == [4] * 4


async def test_a_repeated_step_gets_the_same_answer_and_an_older_one_none() -> None:
    calls = 0

    def run_batch(jobs: Sequence[IntJob]) -> None:
        nonlocal calls
        calls += 1
        for job in jobs:
            finish(job, calls)

    async with running(run_batch) as loop:
        await open_sequence(loop, "a")
        assert [await step(loop, "a", index) for index in (0, 1, 1)] == [1, 2, 2]
        with pytest.raises(StaleStep):
            await step(loop, "a", 0)


async def test_a_step_goes_on_without_its_caller_and_is_joined_by_the_next() -> None:
    entered, release = threading.Event(), threading.Event()
    calls = 0

    def run_batch(jobs: Sequence[IntJob]) -> None:
        nonlocal calls
        calls += 1
        entered.set()
        release.wait(5)
        count_batch(jobs)

    async with running(run_batch) as loop:
        await open_sequence(loop, "a")
        first = asyncio.create_task(step(loop, "a", 0))
        await asyncio.to_thread(entered.wait, 5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(step(loop, "a", 0))
        await asyncio.to_thread(release.set)
        assert await second == 1
        assert calls == 1


async def test_a_sequence_is_not_freed_while_a_batch_computes_with_it() -> None:
    entered, release = threading.Event(), threading.Event()

    def run_batch(jobs: Sequence[IntJob]) -> None:
        entered.set()
        release.wait(5)
        assert all(job.sequence.kv.block_ids for job in jobs)
        count_batch(jobs)

    async with running(run_batch) as loop:
        await open_sequence(loop, "a", max_length=16)
        call = asyncio.create_task(step(loop, "a", 0))
        await asyncio.to_thread(entered.wait, 5)
        closing = asyncio.create_task(loop.close("a"))
        with pytest.raises(RequestCancelled):
            await call
        assert not closing.done()
        with pytest.raises(KVExhausted):
            await open_sequence(loop, "b", max_length=16)
        release.set()
        await closing
        await open_sequence(loop, "b", max_length=16)


async def test_one_job_that_fails_leaves_the_others_alone() -> None:
    def run_batch(jobs: Sequence[IntJob]) -> None:
        for job in jobs:
            if job.sequence.sequence_id == "bad":
                job.error = HeadraceError("not a number")
            else:
                finish(job, 1)

    async with running(run_batch) as loop:
        await open_sequence(loop, "bad")
        await open_sequence(loop, "good")
        bad, good = await asyncio.gather(
            step(loop, "bad", 0), step(loop, "good", 0), return_exceptions=True
        )
        assert isinstance(bad, HeadraceError)
        assert good == 1


async def test_a_batch_that_raises_fails_its_steps_and_the_loop_lives() -> None:
    should_fail = True

    def run_batch(jobs: Sequence[IntJob]) -> None:
        if should_fail:
            raise RuntimeError("a bug")
        count_batch(jobs)

    async with running(run_batch) as loop:
        await open_sequence(loop, "a")
        with pytest.raises(HeadraceError, match="internal error"):
            await step(loop, "a", 0)
        should_fail = False
        assert await step(loop, "a", 0) == 1


async def test_a_sequence_that_is_not_open_is_unknown() -> None:
    async with running(count_batch) as loop:
        with pytest.raises(UnknownSequence):
            await step(loop, "a", 0)
