"""The Target service on the wire: unpack, one call, pack."""

from opentelemetry import trace

from headrace import telemetry
from headrace.rpc import common_pb2, target_pb2, target_pb2_grpc
from headrace.rpc.convert import (
    model_info_to_message,
    proposal_from_message,
    sampling_from_message,
    verdict_to_message,
)
from headrace.rpc.server import Context
from headrace.types import ModelInfo
from services.target.verifier import Verifier


class TargetServicer(target_pb2_grpc.TargetServicer):
    """Serves one Verifier."""

    def __init__(self, verifier: Verifier, info: ModelInfo) -> None:
        self._verifier = verifier
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
        await self._verifier.open(
            request.sequence_id,
            list(request.token_ids),
            sampling_from_message(request.sampling),
            request.max_length,
        )
        return common_pb2.OpenSequenceResponse()

    async def Verify(
        self, request: target_pb2.VerifyRequest, context: Context
    ) -> target_pb2.VerifyResponse:
        """Check one proposal."""
        with telemetry.tracer().start_as_current_span(
            telemetry.SPAN_VERIFY,
            kind=trace.SpanKind.SERVER,
            attributes={
                telemetry.SEQUENCE_ID: request.sequence_id,
                telemetry.STEP_INDEX: request.step_index,
                telemetry.GAMMA: len(request.proposal.token_ids),
            },
        ) as span:
            verdict = await self._verifier.verify(
                request.sequence_id,
                request.step_index,
                request.committed_length,
                proposal_from_message(request.proposal),
            )
            span.set_attribute(telemetry.NUM_ACCEPTED, verdict.num_accepted)
            span.set_attribute(telemetry.QUEUE_NS, verdict.timings.queue_ns)
        return verdict_to_message(verdict)

    async def CloseSequence(
        self, request: common_pb2.CloseSequenceRequest, context: Context
    ) -> common_pb2.CloseSequenceResponse:
        """Free a sequence."""
        await self._verifier.close(request.sequence_id)
        return common_pb2.CloseSequenceResponse()
