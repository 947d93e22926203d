"""The Streamer service on the wire: one Stream call is one session."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace import telemetry
from headrace.errors import HeadraceError, InvalidRequest
from headrace.model.checkpoint import Checkpoint
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.server import Context
from services.streamer.layout import UnitLayout, lay_out, slot_bytes
from services.streamer.reader import Reader
from services.streamer.ring import Ring
from services.streamer.session import Lease, Session

logger = logging.getLogger(__name__)


class StreamerServicer(streamer_pb2_grpc.StreamerServicer):
    """Serves the layers of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        shared_memory_dir: Path,
        num_slots: int,
        num_readers: int,
        chunk_bytes: int,
        reader: Reader,
    ) -> None:
        """Lay out the units.

        Args:
            checkpoint: What to stream.
            shared_memory_dir: Where rings are allocated.
            num_slots: Of a ring; no more than there are units.
            num_readers: Reads in flight.
            chunk_bytes: Largest single read.
            reader: The checkpoint's files.
        """
        reader.require(checkpoint.tensors.values())
        self._name = checkpoint.name
        self._layouts = [lay_out(unit) for unit in checkpoint.units]
        self._shared_memory_dir = shared_memory_dir
        self._num_slots = min(num_slots, len(self._layouts))
        self._chunk_bytes = chunk_bytes
        self._reader = reader
        self._pool = ThreadPoolExecutor(num_readers, thread_name_prefix="reader")
        self._bytes_read_by_ended_sessions = 0
        self._sessions: set[Session] = set()

    async def GetCheckpoint(
        self, request: streamer_pb2.GetCheckpointRequest, context: Context
    ) -> streamer_pb2.CheckpointInfo:
        """Tell what is streamed, and how much was."""
        return streamer_pb2.CheckpointInfo(
            name=self._name,
            num_units=len(self._layouts),
            bytes_per_sweep=sum(layout.num_bytes for layout in self._layouts),
            is_direct=self._reader.is_direct,
            bytes_read_total=self._bytes_read_by_ended_sessions
            + sum(session.bytes_read for session in self._sessions),
        )

    async def Stream(
        self, request_iterator: AsyncIterator[streamer_pb2.StreamRequest], context: Context
    ) -> AsyncGenerator[streamer_pb2.StreamReply]:
        """Run one session."""
        requests = aiter(request_iterator)
        if await _next_kind(requests) != "open_ring":
            raise InvalidRequest("a session begins with open_ring")
        ring = Ring(
            self._shared_memory_dir,
            slot_bytes=slot_bytes(self._layouts),
            num_slots=self._num_slots,
        )
        try:
            await asyncio.to_thread(ring.allocate)
            yield streamer_pb2.StreamReply(ring_layout=_layout_message(ring, self._layouts))
            if await _next_kind(requests) != "ring_mapped":
                raise InvalidRequest("ring_mapped must follow the layout")
            ring.unlink()
            async with contextlib.aclosing(self._leases(ring, requests)) as leases:
                async for lease in leases:
                    yield streamer_pb2.StreamReply(layer_lease=_lease_message(lease))
        except HeadraceError as error:
            logger.warning("a session failed: %s", error.message)
            yield streamer_pb2.StreamReply(failure=_failure_message(error))
        finally:
            ring.unlink()

    async def _leases(
        self, ring: Ring, requests: AsyncIterator[streamer_pb2.StreamRequest]
    ) -> AsyncGenerator[Lease]:
        """Leases for as long as the target sends."""
        session = Session(
            self._layouts, ring, self._reader, self._pool, chunk_bytes=self._chunk_bytes
        )
        self._sessions.add(session)
        filling = asyncio.ensure_future(session.fill())
        hearing = asyncio.ensure_future(_hear(session, requests))
        try:
            while True:
                leasing = asyncio.ensure_future(session.next_lease())
                try:
                    await asyncio.wait({leasing, hearing}, return_when=asyncio.FIRST_COMPLETED)
                    if hearing.done():
                        hearing.result()
                        return  # the target said goodbye
                    yield await leasing
                finally:
                    await _end(leasing)
        finally:
            await _end(filling, hearing)
            session.close()
            self._sessions.discard(session)
            self._bytes_read_by_ended_sessions += session.bytes_read


async def _hear(session: Session, requests: AsyncIterator[streamer_pb2.StreamRequest]) -> None:
    """Take releases, and turn each sweep into a span of every request in it."""
    began_unix_ns = 0
    bytes_read, read_ns = 0, 0
    traceparents: list[str] = []
    async for request in requests:
        kind = request.WhichOneof("kind")
        if kind == "release_lease":
            session.release(request.release_lease.lease_id)
        elif kind == "begin_sweep":
            began_unix_ns = time.time_ns()
            bytes_read, read_ns = session.bytes_read, session.read_ns
            traceparents = list(request.begin_sweep.traceparents)
        elif kind == "end_sweep":
            attributes = {
                telemetry.SWEEP_INDEX: request.end_sweep.sweep_index,
                telemetry.BYTES_STREAMED: session.bytes_read - bytes_read,
                telemetry.READ_NS: session.read_ns - read_ns,
            }
            _record_sweep(traceparents, began_unix_ns, attributes)
        else:
            raise InvalidRequest(f"{kind} has no place in a running session")


def _record_sweep(traceparents: list[str], began_unix_ns: int, attributes: dict[str, int]) -> None:
    for traceparent in traceparents:
        span = telemetry.tracer().start_span(
            telemetry.SPAN_STREAM,
            context=telemetry.extract({"traceparent": traceparent}),
            start_time=began_unix_ns,
            attributes=attributes,
        )
        span.end()


async def _next_kind(requests: AsyncIterator[streamer_pb2.StreamRequest]) -> str | None:
    request = await anext(requests, None)
    return None if request is None else request.WhichOneof("kind")


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _layout_message(ring: Ring, layouts: list[UnitLayout]) -> streamer_pb2.RingLayout:
    return streamer_pb2.RingLayout(
        shared_memory_path=str(ring.path),
        slot_bytes=ring.slot_bytes,
        num_slots=ring.num_slots,
        units=[
            streamer_pb2.UnitLayout(
                layer_index=layout.layer_index,
                num_bytes=layout.num_bytes,
                tensors=[
                    streamer_pb2.TensorLayout(
                        name=tensor.span.name,
                        dtype=tensor.span.dtype,
                        shape=tensor.span.shape,
                        offset_bytes=tensor.slot_offset_bytes,
                    )
                    for tensor in layout.tensors
                ],
            )
            for layout in layouts
        ],
    )


def _lease_message(lease: Lease) -> streamer_pb2.LayerLease:
    return streamer_pb2.LayerLease(
        lease_id=lease.lease_id,
        unit_index=lease.unit_index,
        slot=lease.slot,
        read_ns=lease.read_ns,
    )


def _failure_message(error: HeadraceError) -> streamer_pb2.StreamFailure:
    return streamer_pb2.StreamFailure(error=type(error).__name__, message=error.message)
