"""The Draft service on the wire: unpack, one call, pack."""

from opentelemetry import trace

from headrace import telemetry
from headrace.model.sequence_servicer import SequenceServicer
from headrace.rpc import draft_pb2, draft_pb2_grpc
from headrace.rpc.convert import (
    proposal_to_message,
)
from headrace.rpc.server import Context
from headrace.types import ModelInfo
from services.draft.proposer import Proposer


class DraftServicer(SequenceServicer, draft_pb2_grpc.DraftServicer):
    """Serves one Proposer."""

    def __init__(self, proposer: Proposer, info: ModelInfo) -> None:
        super().__init__(proposer, info)
        self._proposer = proposer

    async def Propose(
        self, request: draft_pb2.ProposeRequest, context: Context
    ) -> draft_pb2.ProposeResponse:
        """Draw one proposal."""
        with telemetry.tracer().start_as_current_span(
            telemetry.SPAN_PROPOSE,
            kind=trace.SpanKind.SERVER,
            attributes={
                telemetry.SEQUENCE_ID: request.sequence_id,
                telemetry.STEP_INDEX: request.step_index,
            },
        ) as span:
            drafted = await self._proposer.propose(
                request.sequence_id,
                request.step_index,
                request.committed_length,
                list(request.new_token_ids),
                request.gamma,
            )
            span.set_attribute(telemetry.GAMMA, drafted.proposal.gamma)
            span.set_attribute(telemetry.QUEUE_NS, drafted.queue_ns)
            span.set_attribute(telemetry.NUM_SEQUENCES, drafted.num_sequences)
        return draft_pb2.ProposeResponse(
            step_index=request.step_index,
            proposal=proposal_to_message(drafted.proposal),
            queue_ns=drafted.queue_ns,
            propose_ns=drafted.propose_ns,
            num_sequences=drafted.num_sequences,
        )
