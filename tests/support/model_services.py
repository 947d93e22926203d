"""A target, with a real streamer beside it, and a draft, in this process."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from headrace.gather import QuietWindow, ReturnWindow
from headrace.model.batch_loop import BatchLoop
from headrace.model.checkpoint import Checkpoint
from headrace.model.compute_thread import ComputeThread
from headrace.model.decoder import Decoder
from headrace.model.device import CPU
from headrace.model.engine import Engine
from headrace.model.sequences import SequenceTable
from headrace.types import Verdict
from services.draft.drafting import Drafted, Drafter, ProposeJob
from services.draft.proposer import Proposer
from services.target.sweep import Sweeper, VerifyJob
from services.target.verifier import Verifier
from tests.support.streamer_rig import feed_from, shared_memory_dir, streamer_of

_NUM_UNITS = 6
"""Of a streamed model where units are not the matter."""


@asynccontextmanager
async def target_of(
    directory: Path,
    *,
    is_streamed: bool = False,
    max_sweep_tokens: int = 256,
    kv_tokens: int = 4096,
    device: torch.device = CPU,
) -> AsyncIterator[Verifier]:
    """A Verifier of one model; streamed weights come over gRPC and shared memory."""
    async with AsyncExitStack() as stack:
        address = None
        if is_streamed:
            shared_memory = stack.enter_context(shared_memory_dir())
            address = f"unix:{shared_memory}/streamer.sock"
            streamer = streamer_of(directory, address, shared_memory, chunk_bytes=1 << 20)
            await stack.enter_async_context(streamer)
        target = target_on(
            directory,
            address,
            unit_bytes=Checkpoint.open(directory).num_bytes // _NUM_UNITS,
            max_sweep_tokens=max_sweep_tokens,
            kv_tokens=kv_tokens,
            device=device,
        )
        yield await stack.enter_async_context(target)


@asynccontextmanager
async def target_on(
    directory: Path,
    address: str | None,
    *,
    unit_bytes: int = 40_000,
    num_slots: int = 3,
    max_sweep_tokens: int = 256,
    kv_tokens: int = 4096,
    device: torch.device = CPU,
) -> AsyncIterator[Verifier]:
    """A Verifier of one model whose weights the streamer there brings; None: they are resident."""
    decoder = Decoder(Checkpoint.open(directory), device=device)
    async with AsyncExitStack() as stack:
        feed = None
        if address is None:
            decoder.load()
        else:
            plan = decoder.plan(unit_bytes=unit_bytes)
            feed = await stack.enter_async_context(
                feed_from(address, directory, plan=plan, num_slots=num_slots, device=device)
            )
            decoder.stream(plan, feed)
        engine = Engine(decoder, kv_tokens=kv_tokens)
        table: SequenceTable[Verdict] = SequenceTable(
            engine.cache, vocab_size=engine.vocab_size, max_context_tokens=engine.max_context_tokens
        )
        sweeper = Sweeper(engine, feed, max_sweep_tokens=max_sweep_tokens)
        loop: BatchLoop[VerifyJob, Verdict] = BatchLoop(
            table,
            sweeper.run,
            window=ReturnWindow(),
            compute=ComputeThread(torch.get_num_threads()),
        )
        await stack.enter_async_context(_running(loop.run()))
        yield Verifier(loop)


@asynccontextmanager
async def draft_of(
    directory: Path, *, max_row_tokens: int = 128, kv_tokens: int = 4096
) -> AsyncIterator[Proposer]:
    """A Proposer of one model."""
    engine = Engine.resident(Checkpoint.open(directory), kv_tokens=kv_tokens)
    table: SequenceTable[Drafted] = SequenceTable(
        engine.cache, vocab_size=engine.vocab_size, max_context_tokens=engine.max_context_tokens
    )
    drafter = Drafter(engine, num_tokens=engine.vocab_size, max_row_tokens=max_row_tokens)
    loop: BatchLoop[ProposeJob, Drafted] = BatchLoop(
        table, drafter.run, window=QuietWindow(), compute=_compute()
    )
    async with _running(loop.run()):
        yield Proposer(loop, max_context_tokens=engine.max_context_tokens)


def _compute() -> ComputeThread:
    return ComputeThread(1)  # tiny models: more would only wait for each other


@asynccontextmanager
async def _running(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
