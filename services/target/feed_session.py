"""One session of the target with the streamer: a ring, mapped, and the stream of its leases."""

import asyncio
import contextlib
import mmap
import os
import queue
from collections.abc import AsyncIterator, Mapping
from math import prod

import torch
from grpc import aio
from torch import Tensor

from headrace.errors import (
    ERRORS_BY_NAME,
    CheckpointCorrupt,
    DeadlineExceeded,
    HeadraceError,
    PeerUnavailable,
)
from headrace.model.dtypes import torch_dtype
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import error_from_status

_MAX_WAIT_S = 120.0
"""For one layer: far longer than any drive takes, so only a streamer that hangs gets here."""

_Outbox = asyncio.Queue[streamer_pb2.StreamRequest | None]
"""What is to be sent; None ends it."""


class FeedSession:
    """One ring, mapped, and the stream of its leases."""

    def __init__(
        self,
        call: "aio.StreamStreamCall[streamer_pb2.StreamRequest, streamer_pb2.StreamReply]",
        replies: AsyncIterator[streamer_pb2.StreamReply],
        outbox: _Outbox,
        layout: streamer_pb2.RingLayout,
        memory: mmap.mmap,
    ) -> None:
        self._call = call
        self._outbox = outbox
        self._layout = layout
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._leases: queue.SimpleQueue[streamer_pb2.LayerLease | HeadraceError] = (
            queue.SimpleQueue()
        )
        self._held: streamer_pb2.LayerLease | None = None
        self._num_released = 0
        self._views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._receiving = asyncio.ensure_future(_receive(replies, self._leases))

    @classmethod
    async def open(
        cls, stub: streamer_pb2_grpc.StreamerStub, *, timeout_s: float, is_patient: bool
    ) -> "FeedSession":
        """Ask for a ring and map it.

        Args:
            stub: The streamer.
            timeout_s: For all of it.
            is_patient: Wait for a streamer that is not there yet.

        Raises:
            HeadraceError: The streamer does not answer, or has no memory for a ring.
        """
        outbox: _Outbox = asyncio.Queue()
        call = stub.Stream(_sent(outbox), wait_for_ready=is_patient)
        with contextlib.ExitStack() as undo:
            undo.callback(call.cancel)
            undo.callback(outbox.put_nowait, None)
            replies = aiter(call)
            outbox.put_nowait(streamer_pb2.StreamRequest(open_ring=streamer_pb2.OpenRing()))
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await anext(replies)
            except aio.AioRpcError as error:
                raise error_from_status(error, peer="streamer") from None
            except (TimeoutError, StopAsyncIteration):
                raise PeerUnavailable("the streamer does not answer") from None
            if reply.HasField("failure"):
                raise _error_of(reply.failure)
            memory = _map(reply.ring_layout)
            undo.pop_all()
        outbox.put_nowait(streamer_pb2.StreamRequest(ring_mapped=streamer_pb2.RingMapped()))
        return cls(call, replies, outbox, reply.ring_layout, memory)

    @property
    def is_at_first_layer(self) -> bool:
        """Whether the next lease is the first layer's, as far as is known."""
        is_between_sweeps = self._num_released % len(self._layout.units) == 0
        return self._held is None and is_between_sweeps and not self._receiving.done()

    @property
    def num_units(self) -> int:
        """Layers of the streamer's checkpoint."""
        return len(self._layout.units)

    @property
    def bytes_per_sweep(self) -> int:
        """What one sweep reads from storage."""
        return sum(unit.num_bytes for unit in self._layout.units)

    @property
    def leased_bytes(self) -> int:
        """Size of the layer that is out."""
        return 0 if self._held is None else self._layout.units[self._held.unit_index].num_bytes

    def send(self, request: streamer_pb2.StreamRequest) -> None:
        """Send a message, from any thread; dropped once the session is over."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, request)

    def acquire(self, layer_index: int) -> Mapping[str, Tensor]:
        """Wait for the next lease: see LayerFeed.acquire."""
        try:
            lease = self._leases.get(timeout=_MAX_WAIT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the streamer did not bring layer {layer_index}") from None
        if isinstance(lease, HeadraceError):
            self._leases.put(lease)  # for whoever asks next
            raise lease
        unit = self._layout.units[lease.unit_index]
        assert self._held is None
        if unit.layer_index != layer_index:
            raise CheckpointCorrupt(
                "the streamer serves another checkpoint than the target: start both with the same "
                "HEADRACE_TARGET_DIR"
            )
        self._held = lease
        key = (lease.unit_index, lease.slot)
        if key not in self._views:
            self._views[key] = self._view(unit, lease.slot)
        return self._views[key]

    def release(self) -> None:
        """Give back what is out."""
        assert self._held is not None
        release = streamer_pb2.ReleaseLease(lease_id=self._held.lease_id)
        self._held = None
        self._num_released += 1
        self.send(streamer_pb2.StreamRequest(release_lease=release))

    async def close(self) -> None:
        """End the call and give the memory back."""
        self._outbox.put_nowait(None)
        self._call.cancel()
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        self._views.clear()
        # A model stays bound to tensors on the ring until its next sweep. They keep the mapping,
        # but must not keep the memory: there may be room for one ring only.
        with contextlib.suppress(OSError):  # a file system that cannot punch holes
            self._memory.madvise(mmap.MADV_REMOVE)

    def _view(self, unit: streamer_pb2.UnitLayout, slot: int) -> Mapping[str, Tensor]:
        return {
            tensor.name: torch.frombuffer(
                self._memory,
                dtype=torch_dtype(tensor.dtype),
                count=prod(tensor.shape),
                offset=slot * self._layout.slot_bytes + tensor.offset_bytes,
            ).view(list(tensor.shape))
            for tensor in unit.tensors
        }


async def _receive(
    replies: AsyncIterator[streamer_pb2.StreamReply],
    leases: "queue.SimpleQueue[streamer_pb2.LayerLease | HeadraceError]",
) -> None:
    """Put every lease in the queue, and at the end why there are no more."""
    error: HeadraceError = PeerUnavailable("the streamer does not answer")
    try:
        async for reply in replies:
            if reply.HasField("failure"):
                error = _error_of(reply.failure)
            else:
                leases.put(reply.layer_lease)
    except aio.AioRpcError:
        pass  # whatever the status, the streamer is gone; a failure it told of stands
    finally:
        leases.put(error)


def _error_of(failure: streamer_pb2.StreamFailure) -> HeadraceError:
    return ERRORS_BY_NAME.get(failure.error, HeadraceError)(failure.message)


async def _sent(outbox: _Outbox) -> AsyncIterator[streamer_pb2.StreamRequest]:
    while (request := await outbox.get()) is not None:
        yield request


def _map(layout: streamer_pb2.RingLayout) -> mmap.mmap:
    try:
        descriptor = os.open(layout.shared_memory_path, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, layout.slot_bytes * layout.num_slots)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PeerUnavailable(
            f"the streamer's shared memory cannot be mapped ({os.strerror(error.errno or 0)}): "
            "run target and streamer on one host, with the same HEADRACE_SHM_DIR"
        ) from None
