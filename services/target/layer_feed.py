"""The target's end of the weight stream: leases in, tensors on shared memory out.

The event loop talks to the streamer; the compute thread waits for leases and gives them back.
"""

import asyncio
import mmap
import os
import queue
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import torch
from grpc import aio
from torch import Tensor

from headrace.errors import DeadlineExceeded, HeadraceError, PeerUnavailable
from headrace.model.dtypes import TORCH_DTYPES
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import error_from_status, open_channel

_START_TIMEOUT_S = 60.0
_MAX_WAIT_S = 120.0
"""For one layer: far longer than any drive takes, so only a streamer that hangs gets here."""


class LayerFeed:
    """Lends each layer's weights to the compute thread, in order, sweep after sweep."""

    def __init__(self, address: str) -> None:
        """Prepare; `open` is the way to get one that is connected."""
        self._channel = open_channel(address)
        self._stub = streamer_pb2_grpc.StreamerStub(self._channel)
        self._session: _Session | None = None
        self.stall_ns = 0
        """Time that the compute thread waited for layers."""
        self.bytes_streamed = 0
        """Bytes of the layers that it got."""

    @classmethod
    async def open(cls, address: str) -> "LayerFeed":
        """Connect and map the ring.

        Raises:
            PeerUnavailable: The streamer does not answer.
        """
        feed = cls(address)
        try:
            await feed.reopen()
        except BaseException:
            await feed.close()
            raise
        return feed

    @property
    def bytes_per_sweep(self) -> int:
        """What one sweep reads from storage."""
        return self._running().bytes_per_sweep

    async def reopen(self) -> None:
        """Begin a new session at the first layer, after a failure or a sweep that was cut off.

        Raises:
            PeerUnavailable: The streamer does not answer.
        """
        await self._end_session()
        self._session = await _Session.open(self._stub)

    async def close(self) -> None:
        """End the session and the connection."""
        await self._end_session()
        await self._channel.close()

    def begin_sweep(self, sweep_index: int, traceparents: Sequence[str]) -> None:
        """Tell the streamer whose requests are in the sweep. On the compute thread."""
        begin = streamer_pb2.BeginSweep(sweep_index=sweep_index, traceparents=traceparents)
        self._running().send(streamer_pb2.StreamRequest(begin_sweep=begin))

    def end_sweep(self, sweep_index: int) -> None:
        """Tell the streamer that all layers of a sweep were released. On the compute thread."""
        end = streamer_pb2.EndSweep(sweep_index=sweep_index)
        self._running().send(streamer_pb2.StreamRequest(end_sweep=end))

    def acquire(self, layer_index: int) -> Mapping[str, Tensor]:
        """The layer's tensors by checkpoint name, on the shared memory. On the compute thread.

        Raises:
            HeadraceError: The stream has failed; `reopen` begins a new one.
        """
        began_ns = time.perf_counter_ns()
        session = self._running()
        tensors = session.acquire(layer_index)
        self.stall_ns += time.perf_counter_ns() - began_ns
        self.bytes_streamed += session.leased_bytes
        return tensors

    def release(self, layer_index: int) -> None:
        """Give the layer's slot back. On the compute thread."""
        self._running().release()

    def _running(self) -> "_Session":
        if self._session is None:
            raise PeerUnavailable("the streamer does not answer")
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _Session:
    """One ring, mapped, and the stream of its leases."""

    def __init__(
        self,
        call: "aio.StreamStreamCall[streamer_pb2.StreamRequest, streamer_pb2.StreamReply]",
        replies: AsyncIterator[streamer_pb2.StreamReply],
        outbox: "asyncio.Queue[streamer_pb2.StreamRequest]",
        layout: streamer_pb2.RingLayout,
        memory: mmap.mmap,
    ) -> None:
        self._call = call
        self._replies = replies
        self._outbox = outbox
        self._layout = layout
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._leases: queue.SimpleQueue[streamer_pb2.LayerLease | HeadraceError] = (
            queue.SimpleQueue()
        )
        self._held: streamer_pb2.LayerLease | None = None
        self._views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._receiving = asyncio.ensure_future(self._receive())

    @classmethod
    async def open(cls, stub: streamer_pb2_grpc.StreamerStub) -> "_Session":
        outbox: asyncio.Queue[streamer_pb2.StreamRequest] = asyncio.Queue()
        call = stub.Stream(_drain(outbox), wait_for_ready=True)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                outbox.put_nowait(streamer_pb2.StreamRequest(open_ring=streamer_pb2.OpenRing()))
                replies = aiter(call)
                layout = (await anext(replies)).ring_layout
            memory = _map(layout)
        except aio.AioRpcError as error:
            raise error_from_status(error, peer="streamer") from None
        except (TimeoutError, StopAsyncIteration):
            call.cancel()
            raise PeerUnavailable("the streamer does not answer") from None
        outbox.put_nowait(streamer_pb2.StreamRequest(ring_mapped=streamer_pb2.RingMapped()))
        return cls(call, replies, outbox, layout, memory)

    @property
    def bytes_per_sweep(self) -> int:
        return sum(unit.num_bytes for unit in self._layout.units)

    @property
    def leased_bytes(self) -> int:
        return 0 if self._held is None else self._layout.units[self._held.unit_index].num_bytes

    def send(self, request: streamer_pb2.StreamRequest) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, request)

    def acquire(self, layer_index: int) -> Mapping[str, Tensor]:
        try:
            lease = self._leases.get(timeout=_MAX_WAIT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the streamer did not bring layer {layer_index}") from None
        if isinstance(lease, HeadraceError):
            self._leases.put(lease)  # for whoever asks next
            raise lease
        unit = self._layout.units[lease.unit_index]
        assert self._held is None
        assert unit.layer_index == layer_index
        self._held = lease
        key = (lease.unit_index, lease.slot)
        if key not in self._views:
            self._views[key] = self._view(unit, lease.slot)
        return self._views[key]

    def release(self) -> None:
        assert self._held is not None
        release = streamer_pb2.ReleaseLease(lease_id=self._held.lease_id)
        self._held = None
        self.send(streamer_pb2.StreamRequest(release_lease=release))

    async def close(self) -> None:
        """End the call. The memory goes when the last tensor on it does."""
        self._call.cancel()
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        self._views.clear()

    def _view(self, unit: streamer_pb2.UnitLayout, slot: int) -> Mapping[str, Tensor]:
        return {
            tensor.name: torch.frombuffer(
                self._memory,
                dtype=TORCH_DTYPES[tensor.dtype],
                count=_num_elements(tensor.shape),
                offset=slot * self._layout.slot_bytes + tensor.offset_bytes,
            ).view(*tensor.shape)
            for tensor in unit.tensors
        }

    async def _receive(self) -> None:
        error: HeadraceError = PeerUnavailable("the streamer ended the stream")
        try:
            async for reply in self._replies:
                self._leases.put(reply.layer_lease)
        except aio.AioRpcError as failure:
            error = error_from_status(failure, peer="streamer")
        finally:
            self._leases.put(error)


async def _drain(
    outbox: "asyncio.Queue[streamer_pb2.StreamRequest]",
) -> AsyncIterator[streamer_pb2.StreamRequest]:
    while True:
        yield await outbox.get()


def _map(layout: streamer_pb2.RingLayout) -> mmap.mmap:
    descriptor = os.open(layout.shared_memory_path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, layout.slot_bytes * layout.num_slots)
    finally:
        os.close(descriptor)


def _num_elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
