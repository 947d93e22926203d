"""The Streamer service on the wire: one Stream call is one session of one target."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from headrace import telemetry
from headrace.errors import HeadraceError, InvalidRequest
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.server import Context
from services.streamer.registry import StreamRegistry
from services.streamer.stream import Lease, Member, Stream

logger = logging.getLogger(__name__)


class StreamerServicer(streamer_pb2_grpc.StreamerServicer):
    """Serves the weights of one checkpoint."""

    def __init__(self, registry: StreamRegistry) -> None:
        self._registry = registry

    async def GetStreamer(
        self, request: streamer_pb2.GetStreamerRequest, context: Context
    ) -> streamer_pb2.StreamerInfo:
        """Tell what is streamed, and how much was."""
        reader = self._registry.reader
        return streamer_pb2.StreamerInfo(
            name=self._registry.checkpoint.name,
            is_direct=reader.is_direct,
            bytes_read_total=reader.meter.num_bytes,
            busy_ns_total=reader.meter.busy_ns,
            num_sessions=self._registry.num_members,
        )

    async def Stream(
        self, request_iterator: AsyncIterator[streamer_pb2.StreamRequest], context: Context
    ) -> AsyncGenerator[streamer_pb2.StreamReply]:
        """Run one session."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or first.WhichOneof("kind") != "open_ring":
            raise InvalidRequest("a session begins with open_ring")
        try:
            async with self._registry.member(first.open_ring) as (stream, member):
                yield streamer_pb2.StreamReply(ring_layout=_layout_message(stream))
                async with contextlib.aclosing(_leases(member, requests)) as leases:
                    async for lease in leases:
                        yield streamer_pb2.StreamReply(unit_lease=_lease_message(lease))
        except HeadraceError as error:
            logger.warning("a session ended: %s", error.message)
            yield streamer_pb2.StreamReply(failure=_failure_message(error))


async def _leases(
    member: Member, requests: AsyncIterator[streamer_pb2.StreamRequest]
) -> AsyncGenerator[Lease]:
    """Leases for as long as the target sends."""
    hearing = asyncio.ensure_future(_hear(member, requests))
    try:
        while True:
            leasing = asyncio.ensure_future(member.next_lease())
            try:
                await asyncio.wait({leasing, hearing}, return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():
                    hearing.result()
                    return  # the target said goodbye
                yield await leasing
            finally:
                await _end(leasing)
    finally:
        await _end(hearing)


async def _hear(member: Member, requests: AsyncIterator[streamer_pb2.StreamRequest]) -> None:
    """Pass on what the target sends, and turn each sweep into a span of every request in it."""
    began_unix_ns = 0
    bytes_leased, read_ns = 0, 0
    traceparents: list[str] = []
    async for request in requests:
        kind = request.WhichOneof("kind")
        if kind == "release_lease":
            member.release(request.release_lease.lease_id)
        elif kind == "begin_sweep":
            began_unix_ns = time.time_ns()
            bytes_leased, read_ns = member.bytes_leased, member.read_ns
            traceparents = list(request.begin_sweep.traceparents)
            member.begin_sweep()
        elif kind == "end_sweep":
            attributes = {
                telemetry.SWEEP_INDEX: request.end_sweep.sweep_index,
                telemetry.BYTES_STREAMED: member.bytes_leased - bytes_leased,
                telemetry.READ_NS: member.read_ns - read_ns,
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


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


def _layout_message(stream: Stream) -> streamer_pb2.RingLayout:
    return streamer_pb2.RingLayout(
        shared_memory_path=str(stream.ring.path),
        slot_bytes=stream.ring.slot_bytes,
        num_slots=stream.ring.num_slots,
        units=[
            streamer_pb2.UnitLayout(
                num_bytes=layout.num_bytes, slice_offsets_bytes=layout.offsets_bytes
            )
            for layout in stream.layouts
        ],
    )


def _lease_message(lease: Lease) -> streamer_pb2.UnitLease:
    return streamer_pb2.UnitLease(
        lease_id=lease.lease_id,
        unit_index=lease.unit_index,
        slot=lease.slot,
        read_ns=lease.read_ns,
    )


def _failure_message(error: HeadraceError) -> streamer_pb2.StreamFailure:
    return streamer_pb2.StreamFailure(error=type(error).__name__, message=error.message)
