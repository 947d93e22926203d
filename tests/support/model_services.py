"""A target, with a real streamer beside it, and a draft, in this process."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.model.batch_loop import BatchLoop
from headrace.model.checkpoint import Checkpoint
from headrace.model.engine import Engine
from headrace.model.sequences import SequenceTable
from headrace.rpc import streamer_pb2_grpc
from headrace.rpc.server import RpcServer
from headrace.types import Verdict
from services.draft.drafting import Drafted, Drafter, ProposeJob
from services.draft.proposer import Proposer
from services.streamer.reader import Reader
from services.streamer.servicer import StreamerServicer
from services.target.layer_feed import LayerFeed
from services.target.sweep import Sweeper, VerifyJob
from services.target.verifier import Verifier


@asynccontextmanager
async def target_of(
    directory: Path,
    *,
    is_streamed: bool = False,
    max_sweep_tokens: int = 256,
    kv_tokens: int = 4096,
) -> AsyncIterator[Verifier]:
    """A Verifier of one model; streamed layers come over gRPC and shared memory."""
    async with AsyncExitStack() as stack:
        checkpoint = Checkpoint.open(directory)
        feed = None
        if is_streamed:
            feed = await stack.enter_async_context(_feed(checkpoint))
        engine = Engine(checkpoint, kv_tokens=kv_tokens, layer_source=feed)
        table: SequenceTable[Verdict] = SequenceTable(
            engine.cache,
            vocab_size=engine.vocab_size,
            max_context_tokens=engine.max_context_tokens,
        )
        sweeper = Sweeper(engine, feed, max_sweep_tokens=max_sweep_tokens)
        loop: BatchLoop[VerifyJob, Verdict] = BatchLoop(
            table, sweeper.run, recover=None if feed is None else feed.reopen
        )
        await stack.enter_async_context(_running(loop.run()))
        yield Verifier(loop)


@asynccontextmanager
async def draft_of(
    directory: Path, *, max_row_tokens: int = 128, kv_tokens: int = 4096
) -> AsyncIterator[Proposer]:
    """A Proposer of one model."""
    engine = Engine(Checkpoint.open(directory), kv_tokens=kv_tokens)
    table: SequenceTable[Drafted] = SequenceTable(
        engine.cache, vocab_size=engine.vocab_size, max_context_tokens=engine.max_context_tokens
    )
    drafter = Drafter(engine, num_tokens=engine.vocab_size, max_row_tokens=max_row_tokens)
    loop: BatchLoop[ProposeJob, Drafted] = BatchLoop(table, drafter.run)
    async with _running(loop.run()):
        yield Proposer(loop, max_context_tokens=engine.max_context_tokens)


@asynccontextmanager
async def _feed(checkpoint: Checkpoint) -> AsyncIterator[LayerFeed]:
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/streamer.sock"
        server = RpcServer(address=address, service_names=["headrace.v1.Streamer"])
        servicer = StreamerServicer(
            checkpoint,
            shared_memory_dir=Path(directory),
            num_slots=3,
            num_readers=2,
            chunk_bytes=1 << 20,
            reader=Reader(sorted({span.file for span in checkpoint.tensors.values()})),
        )
        streamer_pb2_grpc.add_StreamerServicer_to_server(servicer, server.server)
        await server.start()
        feed = await LayerFeed.open(address)
        try:
            yield feed
        finally:
            await feed.close()
            await server.stop(0)


@asynccontextmanager
async def _running(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(coroutine)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
