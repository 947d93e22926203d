"""Answers Verify: checks a proposal against its sequence and sends it into the next sweep."""

from collections.abc import Sequence

from headrace.errors import InvalidRequest, UnknownSequence
from headrace.model.batch_loop import BatchLoop
from headrace.model.sequences import LiveSequence
from headrace.types import Proposal, SamplingParams, Verdict
from services.target.sweep import VerifyJob


class Verifier:
    """The target's side of a step."""

    def __init__(self, loop: BatchLoop[VerifyJob, Verdict]) -> None:
        self._loop = loop

    async def open(
        self, sequence_id: str, token_ids: Sequence[int], sampling: SamplingParams, max_length: int
    ) -> None:
        """Register a sequence from its tokens; its KV is made by the sweeps of its next step."""
        await self._loop.open(sequence_id, token_ids, sampling, max_length=max_length)

    async def close(self, sequence_id: str) -> None:
        """Free a sequence."""
        await self._loop.close(sequence_id)

    async def verify(
        self, sequence_id: str, step_index: int, committed_length: int, proposal: Proposal
    ) -> Verdict:
        """Check one proposal in the next sweep.

        Args:
            sequence_id: An open sequence.
            step_index: Number of the step; the last one again gives the same verdict again.
            committed_length: Tokens before this step.
            proposal: May be empty: plain decoding.

        Raises:
            UnknownSequence: Not open, or at another length: open it again from its tokens.
            StaleStep: A step before the last one.
            InvalidRequest: The proposal does not fit the sequence or the vocabulary.
        """

        def make_job(sequence: LiveSequence[Verdict]) -> VerifyJob:
            if committed_length != len(sequence.token_ids):
                raise UnknownSequence("the sequence has another length here: open it again")
            if committed_length + proposal.gamma > sequence.max_length:
                raise InvalidRequest("the proposal reaches beyond the sequence's max_length")
            self._loop.check_token_ids(proposal.token_ids)
            return VerifyJob(sequence=sequence, step_index=step_index, proposal=proposal)

        return await self._loop.step(sequence_id, step_index, make_job)
