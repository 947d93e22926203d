"""The Target service on the wire: unpack, one call, pack."""

from opentelemetry import trace

from headrace import telemetry
from headrace.model.sequence_servicer import SequenceServicer
from headrace.rpc import target_pb2, target_pb2_grpc
from headrace.rpc.convert import (
    proposal_from_message,
    verdict_to_message,
)
from headrace.rpc.server import Context
from headrace.types import ModelInfo
from services.target.verifier import Verifier


class TargetServicer(SequenceServicer, target_pb2_grpc.TargetServicer):
    """Serves one Verifier."""

    def __init__(self, verifier: Verifier, info: ModelInfo) -> None:
        super().__init__(verifier, info)
        self._verifier = verifier

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
