"""Carries a request's events from its steps to its reader."""

import asyncio
from collections.abc import AsyncIterator

from gateway.events import Event
from headrace.errors import HeadraceError


class Feed:
    """A bounded queue: a slow reader slows its own request, and nobody else's."""

    def __init__(self, *, max_events: int) -> None:
        """Begin empty.

        Args:
            max_events: Events that may wait for the reader.
        """
        self._room = asyncio.Semaphore(max_events)
        self._events: asyncio.Queue[Event | _End] = asyncio.Queue()

    async def put(self, event: Event) -> None:
        """Add an event; waits for the reader when there is no room."""
        await self._room.acquire()
        self._events.put_nowait(event)

    def end(self, error: HeadraceError | None = None) -> None:
        """End the feed, with the error that the reader gets after the last event; never waits."""
        self._events.put_nowait(_End(error))

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The events in order, for one reader.

        Raises:
            HeadraceError: What ended the request early.
        """
        while not isinstance(event := await self._events.get(), _End):
            self._room.release()
            yield event
        if event.error is not None:
            raise event.error


class _End:
    """Marks the end of a feed."""

    def __init__(self, error: HeadraceError | None) -> None:
        self.error = error
