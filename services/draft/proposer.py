"""Answers Propose: takes over what was committed, rolls KV back, joins the next batch."""

from collections.abc import Sequence

from headrace.errors import UnknownSequence
from headrace.model.batch_loop import BatchLoop
from headrace.model.sequences import LiveSequence
from headrace.types import SamplingParams
from services.draft.drafting import Drafted, ProposeJob


class Proposer:
    """The draft's side of a step."""

    def __init__(self, loop: BatchLoop[ProposeJob, Drafted], *, max_context_tokens: int) -> None:
        """Prepare to answer.

        Args:
            loop: Batches the steps.
            max_context_tokens: The draft's own; a sequence may outgrow it and goes on undrafted.
        """
        self._loop = loop
        self._max_context_tokens = max_context_tokens

    async def open(
        self, sequence_id: str, token_ids: Sequence[int], sampling: SamplingParams, max_length: int
    ) -> None:
        """Register a sequence from its tokens; its KV is made by its next step."""
        max_length = max(min(max_length, self._max_context_tokens), len(token_ids))
        await self._loop.open(sequence_id, token_ids, sampling, max_length=max_length)

    async def close(self, sequence_id: str) -> None:
        """Free a sequence."""
        await self._loop.close(sequence_id)

    async def propose(
        self,
        sequence_id: str,
        step_index: int,
        committed_length: int,
        new_token_ids: Sequence[int],
        gamma: int,
    ) -> Drafted:
        """Draw up to gamma draft tokens after the committed ones.

        Args:
            sequence_id: An open sequence.
            step_index: Number of the step; the last one again gives the same proposal again.
            committed_length: Tokens of the sequence, new_token_ids included.
            new_token_ids: Committed since the draft last heard.
            gamma: Draft tokens wanted; fewer come where the draft's context ends.

        Raises:
            UnknownSequence: Not open, or at another length: open it again from its tokens.
            StaleStep: A step before the last one.
        """

        def make_job(sequence: LiveSequence[Drafted]) -> ProposeJob:
            self._loop.check_token_ids(new_token_ids)
            if committed_length == len(sequence.token_ids) + len(new_token_ids):
                _commit(sequence, new_token_ids)
            elif committed_length != len(sequence.token_ids):
                raise UnknownSequence("the sequence has another length here: open it again")
            num_wanted = max(0, min(gamma, sequence.max_length - committed_length))
            return ProposeJob(sequence=sequence, step_index=step_index, gamma=num_wanted)

        return await self._loop.step(sequence_id, step_index, make_job)


def _commit(sequence: LiveSequence[Drafted], new_token_ids: Sequence[int]) -> None:
    """Append committed tokens; KV of draft tokens that were not committed is rolled back."""
    answer = sequence.last_answer
    drafted = () if answer is None else answer.proposal.token_ids
    num_agreed = 0
    for ours, theirs in zip(drafted, new_token_ids, strict=False):
        if ours != theirs:
            break
        num_agreed += 1
    kept = len(sequence.token_ids) + num_agreed
    sequence.token_ids.extend(new_token_ids)
    # The last token always stays pending: the next draw needs its logits.
    sequence.kv.truncate(min(sequence.kv.length, kept, len(sequence.token_ids) - 1))
