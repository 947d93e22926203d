"""The target's end of the weight stream: leases in, tensors on shared memory out.

The event loop talks to the streamer; the compute thread waits for leases and gives them back.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from headrace.errors import PeerUnavailable
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import open_channel
from services.target.feed_session import FeedSession

_START_TIMEOUT_S = 60.0
"""For a streamer that is only just starting."""
_REOPEN_TIMEOUT_S = 20.0
"""For one that answers but has much memory to allocate; one that is away fails at once."""


class LayerFeed:
    """Lends each layer's weights to the compute thread, in order, sweep after sweep.

    Heals by itself: whatever became of the last sweep, the next one begins at the first layer, in
    a new session if it must.
    """

    def __init__(self, address: str) -> None:
        """Prepare; `open` is the way to get one that is connected."""
        self._channel = open_channel(address)
        self._stub = streamer_pb2_grpc.StreamerStub(self._channel)
        self._loop = asyncio.get_running_loop()
        self._session: FeedSession | None = None
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
            feed._session = await FeedSession.open(
                feed._stub, timeout_s=_START_TIMEOUT_S, is_patient=True
            )
        except BaseException:
            await feed.close()
            raise
        return feed

    @property
    def num_units(self) -> int:
        """Layers of the streamer's checkpoint."""
        return self._running().num_units

    @property
    def bytes_per_sweep(self) -> int:
        """What one sweep reads from storage."""
        return self._running().bytes_per_sweep

    async def reopen(self) -> None:
        """Begin a new session at the first layer.

        Raises:
            HeadraceError: The streamer does not answer or cannot serve; a later call may succeed.
        """
        await self._end_session()
        self._session = await FeedSession.open(
            self._stub, timeout_s=_REOPEN_TIMEOUT_S, is_patient=False
        )

    async def close(self) -> None:
        """End the session and the connection; a compute thread that waits for a layer is told."""
        await self._end_session()
        await self._channel.close()

    def begin_sweep(self, sweep_index: int, traceparents: Sequence[str]) -> None:
        """Tell the streamer whose requests are in the sweep. On the compute thread.

        Raises:
            HeadraceError: As `reopen`, which runs first if the last sweep was cut off.
        """
        if self._session is None or not self._session.is_at_first_layer:
            reopening = asyncio.run_coroutine_threadsafe(self.reopen(), self._loop)
            try:
                reopening.result(2 * _REOPEN_TIMEOUT_S)
            except TimeoutError:  # the loop is ending
                raise PeerUnavailable("the streamer does not answer") from None
        begin = streamer_pb2.BeginSweep(sweep_index=sweep_index, traceparents=traceparents)
        self._running().send(streamer_pb2.StreamRequest(begin_sweep=begin))

    def end_sweep(self, sweep_index: int) -> None:
        """Tell the streamer that all layers of a sweep were released. On the compute thread."""
        end = streamer_pb2.EndSweep(sweep_index=sweep_index)
        self._running().send(streamer_pb2.StreamRequest(end_sweep=end))

    def acquire(self, layer_index: int) -> Mapping[str, Tensor]:
        """The layer's tensors by checkpoint name, on the shared memory. On the compute thread.

        Raises:
            HeadraceError: The stream has failed; the next sweep begins a new one.
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

    def _running(self) -> FeedSession:
        if self._session is None:
            raise PeerUnavailable("the streamer does not answer")
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
