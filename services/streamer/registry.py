"""The streams of one checkpoint: targets whose sweeps use equal units share one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.errors import CheckpointCorrupt, InvalidRequest, PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.integrity import Integrity
from headrace.rpc import streamer_pb2
from services.streamer.integrity import PlacedSlice, UnitChecks
from services.streamer.layout import FileRange, UnitLayout, lay_out
from services.streamer.reader import Reader
from services.streamer.ring import Ring
from services.streamer.stream import Member, Stream


class StreamRegistry:
    """Begins a stream with its first member and ends it with its last."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: Reader,
        *,
        shared_memory_dir: Path,
        num_readers: int,
        chunk_bytes: int,
    ) -> None:
        """Begin without streams.

        Args:
            checkpoint: What to stream.
            reader: Its files.
            shared_memory_dir: Where rings are allocated.
            num_readers: Reads in flight.
            chunk_bytes: Largest single read.

        Raises:
            CheckpointCorrupt: A file was cut short, or is not what the manifest says.
        """
        reader.require(checkpoint.tensors.values())
        self.checkpoint = checkpoint
        self.reader = reader
        self._integrity = Integrity(checkpoint)
        self._fingerprint = checkpoint.fingerprint()
        self._shared_memory_dir = shared_memory_dir
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(num_readers, thread_name_prefix="reader")
        self._streams: dict[bytes, Stream] = {}
        self._opening = asyncio.Lock()

    @property
    def num_members(self) -> int:
        """Sessions that are open."""
        return sum(stream.num_members for stream in self._streams.values())

    def stop(self) -> None:
        """Let every session end."""
        for stream in self._streams.values():
            stream.fail(PeerUnavailable("the streamer is stopping"))

    @asynccontextmanager
    async def member(self, wish: streamer_pb2.OpenRing) -> AsyncIterator[tuple[Stream, Member]]:
        """Membership of the stream that reads what a target wants.

        Raises:
            CheckpointCorrupt: The target has opened other files.
            InvalidRequest: It wants what is not there.
            PeerUnavailable: There is not enough shared memory.
        """
        key = wish.SerializeToString(deterministic=True)
        async with self._opening:
            stream = self._streams.get(key)
            if stream is None or stream.is_failed:
                stream = self._streams[key] = await self._begin(wish)
            member = stream.join()
        try:
            yield stream, member
        finally:
            member.leave()
            if stream.num_members == 0:
                stream.close()
                if self._streams.get(key) is stream:
                    del self._streams[key]

    async def _begin(self, wish: streamer_pb2.OpenRing) -> Stream:
        if wish.checkpoint_fingerprint != self._fingerprint:
            raise CheckpointCorrupt(
                "streamer and target have opened different checkpoints, or one of them before it "
                "was changed: start both with the same HEADRACE_TARGET_DIR"
            )
        if not wish.units or not wish.num_slots:
            raise InvalidRequest("a ring needs at least one unit and one slot")
        layouts = [lay_out([self._range(s) for s in unit.slices]) for unit in wish.units]
        ring = Ring(
            self._shared_memory_dir,
            slot_bytes=max(layout.num_bytes for layout in layouts),
            num_slots=wish.num_slots,
        )
        await _allocate(ring)
        return Stream(
            layouts,
            ring,
            self.reader,
            self._pool,
            self._checks(wish, layouts),
            chunk_bytes=self._chunk_bytes,
        )

    def _checks(self, wish: streamer_pb2.OpenRing, layouts: Sequence[UnitLayout]) -> UnitChecks:
        units = [
            [
                self._placed(piece, offset)
                for piece, offset in zip(unit.slices, layout.offsets_bytes, strict=True)
            ]
            for unit, layout in zip(wish.units, layouts, strict=True)
        ]
        return UnitChecks(self._integrity, units)

    def _placed(self, piece: streamer_pb2.TensorSlice, slot_offset_bytes: int) -> PlacedSlice:
        return PlacedSlice(
            span=self.checkpoint.tensors[piece.tensor_name],
            offset_bytes=piece.offset_bytes,
            num_bytes=piece.num_bytes,
            slot_offset_bytes=slot_offset_bytes,
        )

    def _range(self, piece: streamer_pb2.TensorSlice) -> FileRange:
        span = self.checkpoint.tensors.get(piece.tensor_name)
        if span is None or piece.offset_bytes + piece.num_bytes > span.num_bytes:
            raise InvalidRequest(f"the checkpoint has no such bytes of tensor {piece.tensor_name}")
        return FileRange(
            file=span.file,
            offset_bytes=span.offset_bytes + piece.offset_bytes,
            num_bytes=piece.num_bytes,
        )


async def _allocate(ring: Ring) -> None:
    """Allocate on a thread; a call that is cancelled meanwhile leaves nothing behind."""
    allocating = asyncio.get_running_loop().run_in_executor(None, ring.allocate)
    try:
        await asyncio.shield(allocating)
    except asyncio.CancelledError:
        allocating.add_done_callback(lambda _: ring.close())
        raise
