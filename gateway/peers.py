"""The draft and the target as the gateway calls them: typed, bounded, no retries of their own."""

from collections.abc import Sequence

from grpc import aio

from headrace.errors import HeadraceError
from headrace.rpc import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from headrace.rpc.client import invoke
from headrace.rpc.convert import (
    model_info_from_message,
    proposal_from_message,
    proposal_to_message,
    sampling_to_message,
    verdict_from_message,
)
from headrace.types import ModelInfo, Proposal, SamplingParams, Verdict

_GET_MODEL_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 10.0
_PROPOSE_TIMEOUT_S = 60.0
_VERIFY_TIMEOUT_S = 3_600.0  # sweeps are as long as the disk makes them; keepalive sees a dead peer
_CLOSE_TIMEOUT_S = 2.0


class _Peer:
    """What both services share."""

    def __init__(
        self, stub: "draft_pb2_grpc.DraftStub | target_pb2_grpc.TargetStub", name: str
    ) -> None:
        self._stub = stub
        self.name = name

    async def get_model(self) -> ModelInfo:
        """What the process serves."""
        message = await invoke(
            self._stub.GetModel,
            common_pb2.GetModelRequest(),
            peer=self.name,
            timeout_s=_GET_MODEL_TIMEOUT_S,
        )
        return model_info_from_message(message)

    async def open_sequence(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        max_length: int,
    ) -> None:
        """Register a sequence from its committed tokens, or replace it.

        Raises:
            KVExhausted: There are no KV blocks for max_length tokens now.
        """
        request = common_pb2.OpenSequenceRequest(
            sequence_id=sequence_id,
            token_ids=token_ids,
            sampling=sampling_to_message(sampling),
            max_length=max_length,
        )
        await invoke(self._stub.OpenSequence, request, peer=self.name, timeout_s=_OPEN_TIMEOUT_S)

    async def close_sequence(self, sequence_id: str) -> None:
        """Free a sequence; unknown ones are fine."""
        request = common_pb2.CloseSequenceRequest(sequence_id=sequence_id)
        await invoke(self._stub.CloseSequence, request, peer=self.name, timeout_s=_CLOSE_TIMEOUT_S)


class DraftPeer(_Peer):
    """The draft."""

    def __init__(self, channel: aio.Channel) -> None:
        self._draft = draft_pb2_grpc.DraftStub(channel)
        super().__init__(self._draft, "draft")

    async def propose(
        self,
        sequence_id: str,
        *,
        step_index: int,
        committed_length: int,
        new_token_ids: Sequence[int],
        gamma: int,
    ) -> Proposal:
        """At most gamma draft tokens after the committed ones.

        Raises:
            UnknownSequence: It is not open at the length that this call continues.
        """
        request = draft_pb2.ProposeRequest(
            sequence_id=sequence_id,
            step_index=step_index,
            committed_length=committed_length,
            new_token_ids=new_token_ids,
            gamma=gamma,
        )
        response = await invoke(
            self._draft.Propose, request, peer=self.name, timeout_s=_PROPOSE_TIMEOUT_S
        )
        proposal = proposal_from_message(response.proposal)
        if response.step_index != step_index or proposal.gamma > gamma:
            raise HeadraceError("the draft answered another step than it was asked for")
        return proposal


class TargetPeer(_Peer):
    """The target."""

    def __init__(self, channel: aio.Channel) -> None:
        self._target = target_pb2_grpc.TargetStub(channel)
        super().__init__(self._target, "target")

    async def verify(
        self, sequence_id: str, *, step_index: int, committed_length: int, proposal: Proposal
    ) -> Verdict:
        """The target's answer to a proposal, which may be empty.

        Raises:
            UnknownSequence: It is not open at the committed length.
        """
        request = target_pb2.VerifyRequest(
            sequence_id=sequence_id,
            step_index=step_index,
            committed_length=committed_length,
            proposal=proposal_to_message(proposal),
        )
        response = await invoke(
            self._target.Verify, request, peer=self.name, timeout_s=_VERIFY_TIMEOUT_S
        )
        verdict = verdict_from_message(response)
        if verdict.step_index != step_index or not _fits(verdict, proposal):
            raise HeadraceError("the target answered another step than it was asked for")
        return verdict


def _fits(verdict: Verdict, proposal: Proposal) -> bool:
    return (
        verdict.num_accepted <= proposal.gamma
        and len(verdict.output_token_ids) == verdict.num_accepted + 1
    )
