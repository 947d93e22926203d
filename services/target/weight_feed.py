"""The target's end of the weight stream: leases in, tensors out.

The event loop talks to the streamer; the compute thread waits for leases and gives them back.
"""

import asyncio
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.errors import PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.device import CPU
from headrace.model.dtypes import torch_dtype
from headrace.model.sweep_plan import Piece, SweepPlan
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.client import open_channel
from headrace.rpc.server import MAX_MODEL_MESSAGE_BYTES
from services.target.feed_session import FeedSession
from services.target.ring import LeasedUnit
from services.target.units import Units, units_on

_START_TIMEOUT_S = 60.0
"""For a streamer that is only just starting."""
_REOPEN_TIMEOUT_S = 20.0
"""For one that answers but has much memory to allocate; one that is away fails at once."""


class WeightFeed:
    """Lends the pieces of a plan to the compute thread, in order, sweep after sweep.

    Heals by itself: whatever became of the last sweep, the next one begins at the first unit, in
    a new session if it must.
    """

    def __init__(
        self,
        address: str,
        checkpoint: Checkpoint,
        plan: SweepPlan,
        *,
        num_slots: int,
        device: torch.device = CPU,
    ) -> None:
        """Prepare; `open` is the way to get one that is connected."""
        self._channel = open_channel(address, max_message_bytes=MAX_MODEL_MESSAGE_BYTES)
        self._stub = streamer_pb2_grpc.StreamerStub(self._channel)
        self._wish = _wish(checkpoint, plan, num_slots)
        self._pieces = {
            unit.first_piece + index: piece
            for unit in plan.streamed_units
            for index, piece in enumerate(unit.pieces)
        }
        self._places = {
            unit.first_piece + index: index
            for unit in plan.streamed_units
            for index in range(len(unit.pieces))
        }
        self._last_pieces = {unit.end_piece - 1 for unit in plan.streamed_units}
        self._loop = asyncio.get_running_loop()
        self._device = device
        self._units: Units | None = None
        self._unit: LeasedUnit | None = None
        self.stall_ns = 0
        """Time that the compute thread waited for units."""
        self.bytes_streamed = 0
        """Bytes of the units that it got."""

    @classmethod
    async def open(
        cls,
        address: str,
        checkpoint: Checkpoint,
        plan: SweepPlan,
        *,
        num_slots: int,
        device: torch.device = CPU,
    ) -> "WeightFeed":
        """Connect and map the ring.

        Args:
            address: Of the streamer.
            checkpoint: The model.
            plan: What its sweeps use.
            num_slots: To fill ahead.
            device: Where sweeps compute.

        Raises:
            HeadraceError: The streamer does not answer, has other files, or no memory for a ring.
        """
        feed = cls(address, checkpoint, plan, num_slots=num_slots, device=device)
        try:
            await feed._begin_session(timeout_s=_START_TIMEOUT_S, is_patient=True)
        except BaseException:
            await feed.close()
            raise
        return feed

    @property
    def bytes_per_sweep(self) -> int:
        """What one sweep reads from storage."""
        return self._running().session.ring.bytes_per_sweep

    async def reopen(self) -> None:
        """Begin a new session.

        Raises:
            HeadraceError: The streamer does not answer or cannot serve; a later call may succeed.
        """
        await self._end_session()
        await self._begin_session(timeout_s=_REOPEN_TIMEOUT_S, is_patient=False)

    async def close(self) -> None:
        """End the session and the connection; a compute thread that waits for a unit is told."""
        await self._end_session()
        await self._channel.close()

    def begin_sweep(self, sweep_index: int, traceparents: Sequence[str]) -> None:
        """Ask for a sweep's leases, and tell whose requests are in it. On the compute thread.

        Raises:
            HeadraceError: As `reopen`, which runs first if the last sweep was cut off.
        """
        if self._units is None or not self._units.is_between_sweeps:
            reopening = asyncio.run_coroutine_threadsafe(self.reopen(), self._loop)
            try:
                reopening.result(2 * _REOPEN_TIMEOUT_S)
            except TimeoutError:  # the loop is ending
                raise PeerUnavailable("the streamer does not answer") from None
        begin = streamer_pb2.BeginSweep(sweep_index=sweep_index, traceparents=traceparents)
        units = self._running()
        units.session.send(streamer_pb2.StreamRequest(begin_sweep=begin))
        units.begin()

    def end_sweep(self, sweep_index: int) -> None:
        """Tell the streamer that all units of a sweep were released. On the compute thread."""
        end = streamer_pb2.EndSweep(sweep_index=sweep_index)
        self._running().session.send(streamer_pb2.StreamRequest(end_sweep=end))

    def acquire(self, piece_index: int) -> Tensor:
        """[rows, columns] of a piece, where the sweep computes. On the compute thread.

        Raises:
            HeadraceError: The stream has failed; the next sweep begins a new one.
        """
        if self._unit is None:
            began_ns = time.perf_counter_ns()
            self._unit = self._running().acquire()
            self.stall_ns += time.perf_counter_ns() - began_ns
            self.bytes_streamed += self._unit.num_bytes
        offset = self._unit.offsets_bytes[self._places[piece_index]]
        return _rows(self._unit.slot, offset, self._pieces[piece_index])

    def release(self, piece_index: int) -> None:
        """End the use of a piece; with the last one of a unit, its slot goes back."""
        if piece_index in self._last_pieces:
            self._unit = None
            self._running().release()

    def _running(self) -> Units:
        if self._units is None:
            raise PeerUnavailable("the streamer does not answer")
        return self._units

    async def _begin_session(self, *, timeout_s: float, is_patient: bool) -> None:
        session = await FeedSession.open(
            self._stub, self._wish, timeout_s=timeout_s, is_patient=is_patient
        )
        try:
            self._units = await asyncio.to_thread(units_on, self._device, session)
        except BaseException:
            await session.close()
            raise

    async def _end_session(self) -> None:
        units, self._units = self._units, None
        self._unit = None
        if units is not None:
            await units.close()


def _rows(slot: Tensor, offset_bytes: int, piece: Piece) -> Tensor:
    dtype = torch_dtype(piece.span.dtype)
    data = slot[offset_bytes : offset_bytes + piece.num_bytes]
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()  # a tensor at an odd place in its file
    return data.view(dtype).view(piece.num_rows, piece.num_columns)


def _wish(checkpoint: Checkpoint, plan: SweepPlan, num_slots: int) -> streamer_pb2.OpenRing:
    return streamer_pb2.OpenRing(
        checkpoint_fingerprint=checkpoint.fingerprint(),
        num_slots=min(num_slots, len(plan.streamed_units)),
        units=[
            streamer_pb2.StreamedUnit(slices=[_slice(piece) for piece in unit.pieces])
            for unit in plan.streamed_units
        ],
    )


def _slice(piece: Piece) -> streamer_pb2.TensorSlice:
    return streamer_pb2.TensorSlice(
        tensor_name=piece.span.name,
        offset_bytes=piece.offset_bytes - piece.span.offset_bytes,
        num_bytes=piece.num_bytes,
    )
