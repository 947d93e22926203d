"""Lets sequences wait for the turn that the batcher gives them."""

import asyncio
from collections.abc import Sequence

from gateway.batcher import Batcher


class Admission:
    """The batcher with someone to wake."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._turns: dict[str, asyncio.Event] = {}

    def enter(self, sequence_ids: Sequence[str]) -> None:
        """Take all sequences of a request or none; raises QueueFull."""
        admitted = self._batcher.enter(sequence_ids)
        self._turns.update((sequence_id, asyncio.Event()) for sequence_id in sequence_ids)
        self._wake(admitted)

    async def turn(self, sequence_id: str) -> None:
        """Return when the sequence may run."""
        await self._turns[sequence_id].wait()

    def leave(self, sequence_id: str) -> None:
        """Make room; a sequence that left already is fine."""
        self._turns.pop(sequence_id, None)
        self._wake(self._batcher.leave(sequence_id))

    def _wake(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._turns[sequence_id].set()
