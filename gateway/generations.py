"""All requests that are alive in this gateway: take them in, cancel them, drain."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from gateway.generation import Backend, Generation
from gateway.spec import GenerationSpec
from headrace.errors import HeadraceError, PeerUnavailable
from headrace.rpc.deadline import remaining_s

logger = logging.getLogger(__name__)

_ID_PREFIXES = {"chat": "chatcmpl", "text_completion": "cmpl"}
_MAX_CANCEL_S = 1.0
_RENEWALS_PER_LEASE = 3


class Generations:
    """The live requests. Use it as an async context manager; leaving it cancels what is left."""

    def __init__(self, backend: Backend, *, request_timeout_s: float, lease_s: float) -> None:
        """Begin empty.

        Args:
            backend: What the requests work with.
            request_timeout_s: Longest life of a request, waiting included.
            lease_s: How long a request stays owned without a renewal.
        """
        self._backend = backend
        self._request_timeout_s = request_timeout_s
        self._renewal_s = lease_s / _RENEWALS_PER_LEASE
        self._live: dict[str, Generation] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Generations":
        await self._group.__aenter__()
        self._tasks.add(self._group.create_task(self._renew_leases()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # The tasks report their errors to their readers, so the group itself has nothing to raise.
        await self._group.__aexit__(None, None, None)

    async def submit(self, spec: GenerationSpec) -> Generation:
        """Take a request in and start it.

        Raises:
            QueueFull: Too many sequences wait already.
            PeerUnavailable: The store does not answer.
        """
        request_id = f"{_ID_PREFIXES[spec.operation]}-{secrets.token_hex(16)}"
        generation = Generation(spec, self._backend, request_id=request_id)
        admission = self._backend.admission
        admission.enter(generation.sequence_ids)
        try:
            await self._backend.store.create(request_id, model=self._backend.model_name, spec=spec)
        except BaseException:
            for sequence_id in generation.sequence_ids:
                admission.leave(sequence_id)
            raise
        left_s = remaining_s()
        timeout_s = self._request_timeout_s if left_s is None else left_s
        self._live[request_id] = generation
        self._is_idle.clear()
        task = generation.start(self._group, timeout_s=min(timeout_s, self._request_timeout_s))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(request_id, done))
        return generation

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when no such request is live."""
        generation = self._live.get(request_id)
        if generation is not None:
            generation.cancel()
        return generation is not None

    async def drain(
        self, grace_s: float, *, hurry: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Let the live requests finish for grace_s, or until hurry returns; cancel the rest."""
        logger.info("%d live requests have %.0f s to finish", len(self._live), grace_s)
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._is_idle.wait())]
        if hurry is not None:
            ends.append(asyncio.ensure_future(hurry()))
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        for generation in self._live.values():
            generation.cancel(PeerUnavailable("the gateway is shutting down: send it again"))
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_CANCEL_S):
                await self._is_idle.wait()

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._live[request_id]
        if not self._live:
            self._is_idle.set()

    async def _renew_leases(self) -> None:
        """Keep what is owned owned while sweeps are long."""
        while True:
            await asyncio.sleep(self._renewal_s)
            try:
                await self._backend.store.renew(list(self._live))
            except HeadraceError as error:
                logger.warning("could not renew leases: %s", error.message)
