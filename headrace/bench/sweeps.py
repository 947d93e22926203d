"""Makes a target sweep, through its service as the gateway does, and tells what the disk did."""

import asyncio
import secrets
import time
from dataclasses import dataclass

import numpy as np

from headrace.errors import HeadraceError
from headrace.rpc import common_pb2, streamer_pb2, streamer_pb2_grpc, target_pb2, target_pb2_grpc
from headrace.rpc.client import invoke
from headrace.rpc.convert import (
    model_info_from_message,
    proposal_to_message,
    sampling_to_message,
    verdict_from_message,
)
from headrace.types import ModelInfo, Proposal, SamplingParams, SparseRow

_STEP_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 10.0
_TOKEN_ID = 1
"""Of every prompt and draft token: what a sweep costs does not depend on it."""
_REST_S = 0.1
"""A disk that reads nothing for so long has filled all slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSample:
    """Some sweeps, one right after the other."""

    num_sweeps: int
    elapsed_s: float
    """From the end of a sweep before them to the end of the last."""
    num_bytes: int
    """Read from storage meanwhile."""
    busy_s: float
    """Part of elapsed_s in which at least one read was under way."""

    @property
    def seconds_per_sweep(self) -> float:
        """Mean."""
        return self.elapsed_s / self.num_sweeps

    @property
    def idle_share(self) -> float:
        """Of the disk, 0 to 1."""
        return max(0.0, 1.0 - self.busy_s / self.elapsed_s)


class SweepDriver:
    """Talks to one target and its streamer."""

    def __init__(
        self,
        target: target_pb2_grpc.TargetStub,
        streamer: streamer_pb2_grpc.StreamerStub,
        info: ModelInfo,
    ) -> None:
        self._target = target
        self._streamer = streamer
        self.info = info

    @classmethod
    async def open(
        cls, target: target_pb2_grpc.TargetStub, streamer: streamer_pb2_grpc.StreamerStub
    ) -> "SweepDriver":
        """Ask the target what it serves."""
        message = await invoke(
            target.GetModel, common_pb2.GetModelRequest(), peer="target", timeout_s=_CALL_TIMEOUT_S
        )
        return cls(target, streamer, model_info_from_message(message))

    async def sample(
        self, *, num_tokens: int, num_sweeps: int, num_sequences: int = 1
    ) -> SweepSample:
        """Sweep some times over sequences that all take part in every sweep.

        One sweep before the sample is not counted: it finds the slots full, the others do not.

        Args:
            num_tokens: Of each sequence in each sweep: gamma + 1.
            num_sweeps: To count.
            num_sequences: Requests at once.

        Raises:
            HeadraceError: The target fails, or has no room for such sequences.
        """
        max_length = 1 + (num_sweeps + 1) * num_tokens
        sequences = [_Sequence(self._target, gamma=num_tokens - 1) for _ in range(num_sequences)]
        try:
            for sequence in sequences:
                await sequence.open(max_length)
            await _step(sequences)
            before, began_s = await self._counters(), time.perf_counter()
            for _ in range(num_sweeps):
                await _step(sequences)
            elapsed_s, after = time.perf_counter() - began_s, await self._counters()
        finally:
            for sequence in sequences:
                await sequence.close()
        return SweepSample(
            num_sweeps=num_sweeps,
            elapsed_s=elapsed_s,
            num_bytes=after.bytes_read_total - before.bytes_read_total,
            busy_s=(after.busy_ns_total - before.busy_ns_total) / 1e9,
        )

    async def rest(self) -> None:
        """Return when the disk has nothing more to read."""
        num_read = -1
        while (now_read := (await self._counters()).bytes_read_total) != num_read:
            num_read = now_read
            await asyncio.sleep(_REST_S)

    async def _counters(self) -> streamer_pb2.StreamerInfo:
        return await invoke(
            self._streamer.GetStreamer,
            streamer_pb2.GetStreamerRequest(),
            peer="streamer",
            timeout_s=_CALL_TIMEOUT_S,
        )


async def _step(sequences: "list[_Sequence]") -> None:
    """One sweep with all of them: they arrive together, so the target gathers them."""
    await asyncio.gather(*(sequence.step() for sequence in sequences))


class _Sequence:
    """Greedy, with gamma draft tokens in every step."""

    def __init__(self, target: target_pb2_grpc.TargetStub, *, gamma: int) -> None:
        row = SparseRow(token_ids=np.array([_TOKEN_ID]), probs=np.array([1.0], dtype=np.float32))
        proposal = Proposal(token_ids=(_TOKEN_ID,) * gamma, draft_rows=(row,) * gamma)
        self._proposal = proposal_to_message(proposal)
        self._target = target
        self._id = secrets.token_hex(8)
        self._step_index = 0
        self._length = 1

    async def open(self, max_length: int) -> None:
        """Begin with a prompt of one token."""
        request = common_pb2.OpenSequenceRequest(
            sequence_id=self._id,
            token_ids=[_TOKEN_ID],
            sampling=sampling_to_message(SamplingParams(temperature=0.0)),
            max_length=max_length,
        )
        await invoke(self._target.OpenSequence, request, peer="target", timeout_s=_CALL_TIMEOUT_S)

    async def step(self) -> None:
        """Have one proposal checked."""
        request = target_pb2.VerifyRequest(
            sequence_id=self._id,
            step_index=self._step_index,
            committed_length=self._length,
            proposal=self._proposal,
        )
        message = await invoke(
            self._target.Verify, request, peer="target", timeout_s=_STEP_TIMEOUT_S
        )
        self._step_index += 1
        self._length += len(verdict_from_message(message).output_token_ids)

    async def close(self) -> None:
        """Free it, if the target still lives."""
        request = common_pb2.CloseSequenceRequest(sequence_id=self._id)
        try:
            await invoke(
                self._target.CloseSequence, request, peer="target", timeout_s=_CALL_TIMEOUT_S
            )
        except HeadraceError:
            return
