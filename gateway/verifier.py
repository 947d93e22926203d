"""One sequence's view of the target: repeats a step until the target answers or time is over."""

import asyncio
import logging
from collections.abc import Iterator

from gateway.peers import TargetPeer
from gateway.sequence import Sequence
from headrace.errors import DeadlineExceeded, KVExhausted, PeerUnavailable, UnknownSequence
from headrace.types import Proposal, Verdict

logger = logging.getLogger(__name__)

_PASSING = (PeerUnavailable, KVExhausted, DeadlineExceeded)
"""Errors that go by; the request's own deadline ends the waiting."""
_MAX_REOPENED = 5
"""Times that one step may find its sequence gone."""


class Verifier:
    """Keeps the sequence open at the target.

    A repeated step has the same outcome: the random streams are keyed by seed and position, and the
    target remembers its last verdict.
    """

    def __init__(self, target: TargetPeer, sequence: Sequence) -> None:
        self._target = target
        self._sequence = sequence

    async def open(self) -> None:
        """Register the sequence; waits while the target is away or its KV cache is full."""
        for delay_s in _delays_s():
            try:
                await self._target.open_sequence(
                    self._sequence.sequence_id,
                    self._sequence.token_ids,
                    self._sequence.sampling,
                    max_length=self._sequence.max_length,
                )
                return
            except _PASSING as error:
                logger.info("waiting for the target: %s", error.message)
            await asyncio.sleep(delay_s)

    async def verify(self, proposal: Proposal) -> Verdict:
        """The target's answer to the step to come.

        Raises:
            UnknownSequence: The target loses the sequence again and again.
        """
        num_reopened = 0
        for delay_s in _delays_s():
            try:
                return await self._target.verify(
                    self._sequence.sequence_id,
                    step_index=self._sequence.step_index,
                    committed_length=len(self._sequence.token_ids),
                    proposal=proposal,
                )
            except UnknownSequence:
                num_reopened += 1
                if num_reopened > _MAX_REOPENED:
                    raise
                await self.open()
            except _PASSING as error:
                logger.info("waiting for the target: %s", error.message)
            await asyncio.sleep(delay_s)
        raise AssertionError("the delays never end")

    async def close(self) -> None:
        """Free the sequence."""
        await self._target.close_sequence(self._sequence.sequence_id)


def _delays_s() -> Iterator[float]:
    """At once, then ever longer, up to two seconds."""
    yield 0.0
    delay_s = 0.05
    while True:
        yield delay_s
        delay_s = min(2.0, 2 * delay_s)
