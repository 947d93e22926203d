"""What must survive a gateway: requests, committed tokens, owners, events. Alone knows Redis.

The keys of a request share its hash tag and expire together:

    headrace:{ID}:request     hash    status, model, spec, created; next_step:CHOICE for each choice
    headrace:{ID}:owner       string  "GATEWAY:EPOCH", for as long as the owner renews it
    headrace:{ID}:tokens:N    list    committed output tokens of choice N
    headrace:{ID}:events      stream  one JSON event a step

A commit is one script: it is applied once, and only by the owner. An absent owner is not the owner:
a gateway that slept through its lease finds the key expired and must not write.
"""

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Literal, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.events import Delta
from gateway.spec import GenerationSpec
from headrace.errors import ConfigError, OwnershipLost, PeerUnavailable, StaleStep

logger = logging.getLogger(__name__)

T = TypeVar("T")
Status = Literal["finished", "failed", "cancelled"]

_SOCKET_TIMEOUT_S = 5.0
_RETRY_DELAYS_S = (0.05, 0.2, 0.8)
_EPOCH = 1
"""Of a request's first owner; whoever takes it over counts up."""

_APPLIED, _NOT_OWNER, _STALE = 1, -1, -2

# KEYS: owner, request, tokens, events.
# ARGV: owner value, lease in ms, time to live in ms, choice, step index, event, token ids...
_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
local field = 'next_step:' .. ARGV[4]
local next_step = tonumber(redis.call('HGET', KEYS[2], field) or '0')
local step = tonumber(ARGV[5])
if step == next_step - 1 then return 1 end
if step ~= next_step then return -2 end
for i = 7, #ARGV do redis.call('RPUSH', KEYS[3], ARGV[i]) end
redis.call('HSET', KEYS[2], field, step + 1)
redis.call('XADD', KEYS[4], '*', 'event', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return 1
"""

# KEYS: owner. ARGV: owner value, lease in ms.
_RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: owner, request. ARGV: owner value, status.
_FINISH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return -1 end
redis.call('HSET', KEYS[2], 'status', ARGV[2])
return redis.call('DEL', KEYS[1])
"""


class Store:
    """The requests that this gateway owns."""

    def __init__(self, redis: Redis, *, lease_s: float, ttl_s: float) -> None:
        """Wrap a client; `connect` is the way to get one.

        Args:
            redis: Decodes responses and does not retry: a lost reply is no lost command.
            lease_s: How long a request stays owned without a renewal.
            ttl_s: How long a request's keys stay after its last commit.
        """
        self._redis = redis
        self._owner = f"{secrets.token_hex(8)}:{_EPOCH}"
        self._lease_ms = round(1_000 * lease_s)
        self._ttl_ms = round(1_000 * ttl_s)

    @classmethod
    async def connect(cls, url: str, *, lease_s: float, ttl_s: float) -> "Store":
        """Open a store and see that it answers.

        Raises:
            ConfigError: It does not, or the url is malformed.
        """
        try:
            redis = Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=_SOCKET_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"REDIS_URL is malformed: {error}") from None
        store = cls(redis, lease_s=lease_s, ttl_s=ttl_s)
        try:
            await _retried(store._redis.ping)
        except PeerUnavailable:
            await store.close()
            raise ConfigError(
                "Redis does not answer: start it, or set REDIS_URL to where it runs"
            ) from None
        return store

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def create(self, request_id: str, *, model: str, spec: GenerationSpec) -> None:
        """Record a new request, owned by this gateway.

        Raises:
            PeerUnavailable: The store does not answer.
        """
        request: dict[Any, Any] = {
            "status": "live",
            "model": model,
            "spec": json.dumps(dataclasses.asdict(spec)),
            "created": int(time.time()),
        }

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hset(_key(request_id, "request"), mapping=request)
                pipeline.pexpire(_key(request_id, "request"), self._ttl_ms)
                pipeline.set(_key(request_id, "owner"), self._owner, px=self._lease_ms)
                await pipeline.execute()

        await _retried(write)

    async def commit(self, request_id: str, delta: Delta) -> None:
        """Make one step last and renew the lease, all or nothing.

        The last committed step of a choice may be committed again; nothing is written twice.

        Raises:
            OwnershipLost: This gateway does not own the request any more.
            StaleStep: The step is not the next one of its choice.
            PeerUnavailable: The store does not answer.
        """
        event = {
            "index": delta.index,
            "text": delta.text,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
        }
        result = await self._eval(
            _COMMIT,
            [
                _key(request_id, "owner"),
                _key(request_id, "request"),
                _key(request_id, f"tokens:{delta.index}"),
                _key(request_id, "events"),
            ],
            [
                self._owner,
                self._lease_ms,
                self._ttl_ms,
                delta.index,
                delta.step_index,
                json.dumps(event),
                *delta.token_ids,
            ],
        )
        if result == _NOT_OWNER:
            raise OwnershipLost("another gateway may own this request now: send it again")
        if result == _STALE:
            raise StaleStep(f"step {delta.step_index} is not the next step of this request")

    async def renew(self, request_ids: Collection[str]) -> None:
        """Renew the leases that this gateway still has; lost ones stay lost."""
        for request_id in request_ids:
            await self._eval(_RENEW, [_key(request_id, "owner")], [self._owner, self._lease_ms])

    async def finish(self, request_id: str, status: Status) -> None:
        """Record how a request ended and give up its lease: nothing can be committed after it."""
        await self._eval(
            _FINISH,
            [_key(request_id, "owner"), _key(request_id, "request")],
            [self._owner, status],
        )

    async def _eval(self, script: str, keys: list[str], values: list[str | int]) -> int:
        async def run() -> int:
            return int(await self._redis.eval(script, len(keys), *keys, *map(str, values)))

        return await _retried(run)


async def _retried(command: Callable[[], Awaitable[T]]) -> T:
    """Run a command that may run twice, a few times at most."""
    for delay_s in _RETRY_DELAYS_S:
        try:
            return await command()
        except RedisError as error:
            logger.warning("the store failed (%s), trying again", type(error).__name__)
        await asyncio.sleep(delay_s)
    try:
        return await command()
    except RedisError:
        raise PeerUnavailable("the state store does not answer: try again later") from None


def _key(request_id: str, name: str) -> str:
    return f"headrace:{{{request_id}}}:{name}"
