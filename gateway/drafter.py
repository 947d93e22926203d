"""One sequence's view of the draft. Whatever befalls the draft, a step only becomes a plain one."""

import asyncio
import logging

from gateway.peers import DraftPeer
from gateway.sequence import Sequence
from headrace.errors import HeadraceError, UnknownSequence
from headrace.types import Proposal

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0
"""How long a sequence decodes plainly before it tries a draft again that failed."""


class Drafter:
    """Keeps the draft in step with the committed tokens and asks it for proposals."""

    def __init__(self, draft: DraftPeer, sequence: Sequence, *, max_context_tokens: int) -> None:
        """Prepare; the sequence is opened with the first proposal.

        Args:
            draft: The draft.
            sequence: What to draft for.
            max_context_tokens: Longest sequence of the draft; beyond it decoding is plain.
        """
        self._draft = draft
        self._sequence = sequence
        self._max_length = min(sequence.max_length, max_context_tokens)
        self._heard_length: int | None = None
        """Committed tokens that the draft knows; None while it does not know the sequence."""
        self._paused_until_s = 0.0

    async def propose(self) -> Proposal:
        """The draft tokens of the step to come; none when the draft is away or has no room."""
        gamma = min(self._sequence.gamma, self._max_length - len(self._sequence.token_ids))
        now_s = asyncio.get_running_loop().time()
        if gamma <= 0 or now_s < self._paused_until_s:
            return Proposal()
        try:
            return await self._propose_or_reopen(gamma)
        except HeadraceError as error:
            logger.warning("decoding plainly for a while: %s", error.message)
            self._heard_length = None
            self._paused_until_s = now_s + _PAUSE_S
            return Proposal()

    async def close(self) -> None:
        """Free the sequence."""
        await self._draft.close_sequence(self._sequence.sequence_id)

    async def _propose_or_reopen(self, gamma: int) -> Proposal:
        try:
            return await self._propose(gamma)
        except UnknownSequence:
            self._heard_length = None
            return await self._propose(gamma)

    async def _propose(self, gamma: int) -> Proposal:
        sequence = self._sequence
        if self._heard_length is None:
            await self._draft.open_sequence(
                sequence.sequence_id,
                sequence.token_ids,
                sequence.sampling,
                max_length=self._max_length,
            )
            self._heard_length = len(sequence.token_ids)
        proposal = await self._draft.propose(
            sequence.sequence_id,
            step_index=sequence.step_index,
            committed_length=len(sequence.token_ids),
            new_token_ids=sequence.token_ids[self._heard_length :],
            gamma=gamma,
        )
        self._heard_length = len(sequence.token_ids)
        return proposal
