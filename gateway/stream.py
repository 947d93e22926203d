"""A request's events as server-sent events."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from gateway.events import Summary
from gateway.generation import Generation
from gateway.responses import ResponseShape, error_body
from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)

_PING_S = 15
_SEND_TIMEOUT_S = 60.0


class GenerationStream(EventSourceResponse):
    """Streams one generation, with comments in silent periods; cancels it when the client goes."""

    def __init__(
        self, generation: Generation, shape: ResponseShape, *, includes_usage: bool
    ) -> None:
        """Prepare.

        Args:
            generation: A started request.
            shape: How its events look.
            includes_usage: End with a usage chunk.
        """
        self._generation = generation
        super().__init__(
            _events(generation, shape, includes_usage=includes_usage),
            headers={"Cache-Control": "no-cache"},
            ping=_PING_S,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            sep="\n",
            send_timeout=_SEND_TIMEOUT_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve it."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("a client stopped reading its stream")
        finally:
            self._generation.cancel()


async def _events(
    generation: Generation, shape: ResponseShape, *, includes_usage: bool
) -> AsyncIterator[str]:
    try:
        async for event in generation:
            if isinstance(event, Summary):
                if includes_usage:
                    yield _dump(shape.usage_chunk(event))
            elif event.text or event.finish_reason:
                yield _dump(shape.chunk(event, includes_usage=includes_usage))
    except HeadraceError as error:
        yield _dump(error_body(error))
        return
    yield "[DONE]"


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
