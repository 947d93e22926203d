"""The calls that draft and target share: tell the model, open and close sequences."""

from collections.abc import Sequence
from typing import Protocol

from headrace.rpc import common_pb2
from headrace.rpc.convert import model_info_to_message, sampling_from_message
from headrace.rpc.server import Context
from headrace.types import ModelInfo, SamplingParams


class SequenceOwner(Protocol):
    """What opens and closes sequences: a Proposer or a Verifier."""

    async def open(
        self, sequence_id: str, token_ids: Sequence[int], sampling: SamplingParams, max_length: int
    ) -> None:
        """Register a sequence from its tokens."""

    async def close(self, sequence_id: str) -> None:
        """Free a sequence."""


class SequenceServicer:
    """Mixed into a servicer."""

    def __init__(self, owner: SequenceOwner, info: ModelInfo) -> None:
        self._owner = owner
        self._info = info

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: Context
    ) -> common_pb2.ModelInfo:
        """Tell what is served."""
        return model_info_to_message(self._info)

    async def OpenSequence(
        self, request: common_pb2.OpenSequenceRequest, context: Context
    ) -> common_pb2.OpenSequenceResponse:
        """Register a sequence."""
        await self._owner.open(
            request.sequence_id,
            list(request.token_ids),
            sampling_from_message(request.sampling),
            request.max_length,
        )
        return common_pb2.OpenSequenceResponse()

    async def CloseSequence(
        self, request: common_pb2.CloseSequenceRequest, context: Context
    ) -> common_pb2.CloseSequenceResponse:
        """Free a sequence."""
        await self._owner.close(request.sequence_id)
        return common_pb2.CloseSequenceResponse()
