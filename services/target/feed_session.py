"""One session of the target with the streamer: a ring, mapped, and the stream of its leases."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator

from grpc import aio

from headrace.errors import ERRORS_BY_NAME, DeadlineExceeded, HeadraceError, PeerUnavailable
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import error_from_status
from services.target.ring import LeasedUnit, Ring

_MAX_WAIT_S = 120.0
"""For one unit: far longer than any drive takes, so only a streamer that hangs gets here."""
_REASON_TIMEOUT_S = 1.0
"""For a session that ended at once to say why."""

_Outbox = asyncio.Queue[streamer_pb2.StreamRequest | None]
"""What is to be sent; None ends it."""


class FeedSession:
    """One ring, mapped, and the stream of its leases."""

    def __init__(
        self,
        call: "aio.StreamStreamCall[streamer_pb2.StreamRequest, streamer_pb2.StreamReply]",
        replies: AsyncIterator[streamer_pb2.StreamReply],
        outbox: _Outbox,
        ring: Ring,
    ) -> None:
        self._call = call
        self._outbox = outbox
        self.ring = ring
        self._loop = asyncio.get_running_loop()
        self._leases: queue.SimpleQueue[streamer_pb2.UnitLease | HeadraceError] = (
            queue.SimpleQueue()
        )
        self._held: streamer_pb2.UnitLease | None = None
        self._next_unit = 0
        self._receiving = asyncio.ensure_future(_receive(replies, self._leases))

    @classmethod
    async def open(
        cls,
        stub: streamer_pb2_grpc.StreamerStub,
        wish: streamer_pb2.OpenRing,
        *,
        timeout_s: float,
        is_patient: bool,
    ) -> "FeedSession":
        """Ask for a ring and map it.

        Args:
            stub: The streamer.
            wish: What sweeps use.
            timeout_s: For all of it.
            is_patient: Wait for a streamer that is not there yet.

        Raises:
            HeadraceError: The streamer does not answer, has other files, or no memory for a ring.
        """
        outbox: _Outbox = asyncio.Queue()
        call = stub.Stream(_sent(outbox), wait_for_ready=is_patient)
        with contextlib.ExitStack() as undo:
            undo.callback(call.cancel)
            undo.callback(outbox.put_nowait, None)
            replies = aiter(call)
            outbox.put_nowait(streamer_pb2.StreamRequest(open_ring=wish))
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await anext(replies)
            except aio.AioRpcError as error:
                raise error_from_status(error, peer="streamer") from None
            except (TimeoutError, StopAsyncIteration):
                raise PeerUnavailable("the streamer does not answer") from None
            if reply.HasField("failure"):
                raise _error_of(reply.failure)
            ring = await _map(reply.ring_layout, replies)
            undo.pop_all()
        return cls(call, replies, outbox, ring)

    @property
    def is_between_sweeps(self) -> bool:
        """Whether a sweep may begin, as far as is known."""
        return self._held is None and self._next_unit == 0 and not self._receiving.done()

    def send(self, request: streamer_pb2.StreamRequest) -> None:
        """Send a message, from any thread; dropped once the session is over."""
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, request)

    def acquire(self) -> LeasedUnit:
        """Wait for the sweep's next unit. On the compute thread.

        Raises:
            HeadraceError: The stream has failed.
        """
        assert self._held is None
        try:
            lease = self._leases.get(timeout=_MAX_WAIT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the streamer did not bring unit {self._next_unit}") from None
        if isinstance(lease, HeadraceError):
            self._leases.put(lease)  # for whoever asks next
            raise type(lease)(lease.message)  # a traceback on that one would keep the ring
        if lease.unit_index != self._next_unit:
            raise PeerUnavailable("the streamer lent a unit out of turn: restart it")
        self._held = lease
        self._next_unit = (self._next_unit + 1) % self.ring.num_units
        return self.ring.unit(lease.unit_index, lease.slot)

    def release(self) -> None:
        """Give back what is out."""
        assert self._held is not None
        release = streamer_pb2.ReleaseLease(lease_id=self._held.lease_id)
        self._held = None
        self.send(streamer_pb2.StreamRequest(release_lease=release))

    async def close(self) -> None:
        """End the call."""
        self._outbox.put_nowait(None)
        self._call.cancel()
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)


async def _map(
    layout: streamer_pb2.RingLayout, replies: AsyncIterator[streamer_pb2.StreamReply]
) -> Ring:
    """Map a ring; one that is gone already went with a session that failed, which says why."""
    try:
        return Ring(layout)
    except PeerUnavailable:
        with contextlib.suppress(aio.AioRpcError, TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_REASON_TIMEOUT_S):
                reply = await anext(replies)
            if reply.HasField("failure"):
                raise _error_of(reply.failure) from None
        raise


async def _receive(
    replies: AsyncIterator[streamer_pb2.StreamReply],
    leases: "queue.SimpleQueue[streamer_pb2.UnitLease | HeadraceError]",
) -> None:
    """Put every lease in the queue, and at the end why there are no more."""
    error: HeadraceError = PeerUnavailable("the streamer does not answer")
    try:
        async for reply in replies:
            if reply.HasField("failure"):
                error = _error_of(reply.failure)
            else:
                leases.put(reply.unit_lease)
    except aio.AioRpcError:
        pass  # whatever the status, the streamer is gone; a failure it told of stands
    finally:
        leases.put(error)


def _error_of(failure: streamer_pb2.StreamFailure) -> HeadraceError:
    return ERRORS_BY_NAME.get(failure.error, HeadraceError)(failure.message)


async def _sent(outbox: _Outbox) -> AsyncIterator[streamer_pb2.StreamRequest]:
    while (request := await outbox.get()) is not None:
        yield request
