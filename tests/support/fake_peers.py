"""A draft and a target without a model, as real gRPC servers.

The toy language: the token after a letter is the next letter, after "z" comes "a" or, on demand,
the end of the sequence; after anything else comes "a". So a prompt that ends in "c" goes on with
"defgh...".
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from headrace.errors import HeadraceError, InvalidRequest, KVExhausted, UnknownSequence
from headrace.rpc import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from headrace.rpc.convert import model_info_to_message, proposal_to_message, verdict_to_message
from headrace.rpc.server import Context, RpcServer
from headrace.types import ModelInfo, Proposal, SparseRow, StepTimings, Verdict
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE

_FIRST_PRINTABLE = ord("!")  # byte-level tokenizers number printable characters from here
A, Z = ord("a") - _FIRST_PRINTABLE, ord("z") - _FIRST_PRINTABLE
BYTES_PER_SWEEP = 1_000_000


def next_token(token_id: int, *, ends_after_z: bool = False) -> int:
    """What the toy language says after a token."""
    if A <= token_id < Z:
        return token_id + 1
    return EOS_ID if token_id == Z and ends_after_z else A


@dataclass(kw_only=True)
class Opened:
    """One open sequence of a fake."""

    token_ids: list[int]
    max_length: int
    seed: int
    last_step_index: int = -1
    last_verdict: Verdict | None = None


@dataclass(kw_only=True)
class FakePeer:
    """What both fakes share: open sequences, errors on demand, a gate."""

    info: ModelInfo
    ends_after_z: bool = False
    opened: dict[str, Opened] = field(default_factory=dict)
    num_opened: int = 0
    num_steps: int = 0
    errors: list[HeadraceError] = field(default_factory=list)
    """Raised by the next steps, one each."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Steps wait while it is clear."""
    num_at_gate: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def GetModel(  # noqa: N802 - named by the proto
        self, request: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.ModelInfo:
        return model_info_to_message(self.info)

    async def OpenSequence(  # noqa: N802 - named by the proto
        self, request: common_pb2.OpenSequenceRequest, context: Context
    ) -> common_pb2.OpenSequenceResponse:
        if request.max_length > self.info.max_context_tokens:
            raise InvalidRequest("longer than the context")
        others = (s.max_length for i, s in self.opened.items() if i != request.sequence_id)
        if sum(others) + request.max_length > self.info.kv_capacity_tokens:
            raise KVExhausted("no KV blocks are free now")
        self.num_opened += 1
        self.opened[request.sequence_id] = Opened(
            token_ids=list(request.token_ids),
            max_length=request.max_length,
            seed=request.sampling.seed,
        )
        return common_pb2.OpenSequenceResponse()

    async def CloseSequence(  # noqa: N802 - named by the proto
        self, request: common_pb2.CloseSequenceRequest, context: Context
    ) -> common_pb2.CloseSequenceResponse:
        self.opened.pop(request.sequence_id, None)
        return common_pb2.CloseSequenceResponse()

    async def enter_step(self, sequence_id: str) -> Opened:
        """Pass the gate, raise what is due, find the sequence."""
        self.num_at_gate += 1
        try:
            await self.gate.wait()
        finally:
            self.num_at_gate -= 1
        if self.errors:
            raise self.errors.pop(0)
        if sequence_id not in self.opened:
            raise UnknownSequence("no such sequence here")
        self.num_steps += 1
        return self.opened[sequence_id]


@dataclass(kw_only=True)
class FakeDraft(FakePeer, draft_pb2_grpc.DraftServicer):
    """Proposes what the toy language says, or, past num_right tokens, something else."""

    num_right: int = 1_000_000
    gammas: list[int] = field(default_factory=list)

    async def Propose(  # noqa: N802 - named by the proto
        self, request: draft_pb2.ProposeRequest, context: Context
    ) -> draft_pb2.ProposeResponse:
        sequence = await self.enter_step(request.sequence_id)
        sequence.token_ids += request.new_token_ids
        if len(sequence.token_ids) != request.committed_length:
            raise UnknownSequence("the sequence has another length here")
        if request.committed_length + request.gamma > sequence.max_length:
            raise InvalidRequest("the proposal reaches beyond max_length")
        self.gammas.append(request.gamma)
        token_ids: list[int] = []
        last = sequence.token_ids[-1]
        for position in range(request.gamma):
            last = next_token(last, ends_after_z=self.ends_after_z)
            token_ids.append(last if position < self.num_right else VOCAB_SIZE - 1)
        row = [np.array([i], dtype=np.int64) for i in token_ids]
        one = np.ones(1, dtype=np.float32)
        proposal = Proposal(
            token_ids=tuple(token_ids),
            draft_rows=tuple(SparseRow(token_ids=ids, probs=one) for ids in row),
        )
        return draft_pb2.ProposeResponse(
            step_index=request.step_index, proposal=proposal_to_message(proposal)
        )


@dataclass(kw_only=True)
class FakeTarget(FakePeer, target_pb2_grpc.TargetServicer):
    """Accepts what the toy language says; each verdict takes a sweep of its own."""

    num_sweeps: int = 0

    async def Verify(  # noqa: N802 - named by the proto
        self, request: target_pb2.VerifyRequest, context: Context
    ) -> target_pb2.VerifyResponse:
        sequence = await self.enter_step(request.sequence_id)
        if request.step_index == sequence.last_step_index and sequence.last_verdict is not None:
            return verdict_to_message(sequence.last_verdict)
        if len(sequence.token_ids) != request.committed_length:
            raise UnknownSequence("the sequence has another length here")
        proposed = list(request.proposal.token_ids)
        if request.committed_length + len(proposed) > sequence.max_length:
            raise InvalidRequest("the proposal reaches beyond max_length")
        output: list[int] = []
        last = sequence.token_ids[-1]
        for token_id in [*proposed, None]:
            last = next_token(last, ends_after_z=self.ends_after_z)
            output.append(last)
            if token_id != last:
                break
        sequence.token_ids += output
        verdict = Verdict(
            step_index=request.step_index,
            num_accepted=len(output) - 1,
            output_token_ids=tuple(output),
            timings=self._timings(),
        )
        sequence.last_step_index, sequence.last_verdict = request.step_index, verdict
        return verdict_to_message(verdict)

    def _timings(self) -> StepTimings:
        self.num_sweeps += 1
        return StepTimings(
            sweep_ns=1_000_000,
            bytes_streamed=BYTES_PER_SWEEP,
            num_sweeps=1,
            num_sequences=1,
            sweep_index=self.num_sweeps,
        )


def model_info(
    name: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_context_tokens: int = 256,
    tokenizer_fingerprint: str = "toy",
    kv_capacity_tokens: int = 4_096,
) -> ModelInfo:
    """What a fake says of itself."""
    return ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        tokenizer_fingerprint=tokenizer_fingerprint,
        num_layers=2,
        kv_capacity_tokens=kv_capacity_tokens,
    )


@asynccontextmanager
async def serving(peer: FakeDraft | FakeTarget, *, address: str) -> AsyncIterator[str]:
    """The address of a fake that listens."""
    server = RpcServer(address=address, service_names=[])
    if isinstance(peer, FakeDraft):
        draft_pb2_grpc.add_DraftServicer_to_server(peer, server.server)
    else:
        target_pb2_grpc.add_TargetServicer_to_server(peer, server.server)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)
