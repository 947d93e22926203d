"""The step loop: propose, verify, commit, publish, until the sequence ends.

Each sequence runs its own; the draft and the target batch whatever is pending, so sequences join
and leave at any step. Knows neither Redis nor the protocols of the peers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from opentelemetry.trace import Span

from gateway.drafter import Drafter
from gateway.events import Delta
from gateway.sequence import Sequence
from gateway.verifier import Verifier
from headrace import telemetry
from headrace.errors import HeadraceError
from headrace.rpc.deadline import deadline_after
from headrace.types import Proposal, Verdict

logger = logging.getLogger(__name__)

Commit = Callable[[Delta], Awaitable[None]]
Publish = Callable[[Delta, int, Verdict], Awaitable[None]]


async def speculate(
    sequence: Sequence,
    *,
    drafter: Drafter | None,
    verifier: Verifier,
    commit: Commit,
    publish: Publish,
) -> None:
    """Run one sequence to its end; it is closed at both peers whatever happens.

    The first step needs no prefill of its own: the prompt travels in the sweep that checks the
    first proposal.

    Args:
        sequence: Grows in place.
        drafter: None is plain decoding.
        verifier: The target's side.
        commit: Makes a step last; a step that it refuses was never published.
        publish: Tells the reader; gets the step's delta, gamma and verdict.
    """
    try:
        await verifier.open()
        while sequence.finish_reason is None:
            with _step_span(sequence) as span:
                proposal = Proposal() if drafter is None else await drafter.propose()
                verdict = await verifier.verify(proposal)
                delta = sequence.advance(verdict.output_token_ids)
                await _commit(delta, commit)
                _describe(span, proposal, verdict)
            await publish(delta, proposal.gamma, verdict)
    finally:
        await _close(drafter, verifier)


async def _commit(delta: Delta, commit: Commit) -> None:
    with telemetry.tracer().start_as_current_span(telemetry.SPAN_COMMIT):
        await commit(delta)


async def _close(drafter: Drafter | None, verifier: Verifier) -> None:
    """Free both sequences, also when this task is being cancelled or its time is over."""
    sides: list[Drafter | Verifier] = [verifier] if drafter is None else [drafter, verifier]
    with deadline_after(None):
        closing = asyncio.gather(*(side.close() for side in sides), return_exceptions=True)
    for outcome in await asyncio.shield(closing):
        if isinstance(outcome, HeadraceError):
            # A peer that is away holds nothing; one that comes back drops what nobody uses.
            logger.info("could not close a sequence: %s", outcome.message)
        elif isinstance(outcome, BaseException):
            raise outcome


def _step_span(sequence: Sequence) -> AbstractContextManager[Span]:
    return telemetry.tracer().start_as_current_span(
        telemetry.SPAN_STEP,
        attributes={
            telemetry.SEQUENCE_ID: sequence.sequence_id,
            telemetry.STEP_INDEX: sequence.step_index,
        },
    )


def _describe(span: Span, proposal: Proposal, verdict: Verdict) -> None:
    timings = verdict.timings
    span.set_attributes(
        {
            telemetry.GAMMA: proposal.gamma,
            telemetry.NUM_ACCEPTED: verdict.num_accepted,
            telemetry.NUM_SEQUENCES: timings.num_sequences,
            telemetry.NUM_TOKENS: timings.num_tokens,
            telemetry.SWEEP_INDEX: timings.sweep_index,
            telemetry.BYTES_STREAMED: timings.bytes_streamed,
            telemetry.QUEUE_NS: timings.queue_ns,
            telemetry.STALL_NS: timings.stall_ns,
            telemetry.FORWARD_NS: timings.forward_ns,
        }
    )
