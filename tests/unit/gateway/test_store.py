import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.events import Delta
from gateway.spec import GenerationSpec
from gateway.store import Store
from headrace.errors import ConfigError, OwnershipLost, PeerUnavailable, StaleStep
from headrace.types import SamplingParams
from tests.support.redis_server import redis_server

SPEC = GenerationSpec(
    operation="chat",
    prompt_token_ids=(1, 2),
    max_tokens=5,
    sampling=SamplingParams(seed=2**64 - 1),
    gamma=4,
)
STEP_0 = Delta(index=0, step_index=0, text="ab", token_ids=(7, 8), finish_reason=None)
STEP_1 = Delta(index=0, step_index=1, text="c", token_ids=(9,), finish_reason="stop")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = await Store.connect(redis_url, lease_s=10, ttl_s=100)
    yield store
    await store.close()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        await client.flushall()
        yield client


async def _events(redis: Redis, request_id: str) -> list[dict[str, object]]:
    entries: Any = await redis.xrange(f"headrace:{{{request_id}}}:events")
    return [json.loads(fields["event"]) for _, fields in entries]


async def _tokens(redis: Redis, request_id: str, choice: int) -> list[Any]:
    tokens: list[Any] = await redis.lrange(f"headrace:{{{request_id}}}:tokens:{choice}", 0, -1)
    return tokens


async def test_a_commit_writes_tokens_step_and_event_together(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await store.commit("r", STEP_0)
    await store.commit("r", STEP_1)
    assert await _tokens(redis, "r", 0) == ["7", "8", "9"]
    assert await redis.hget("headrace:{r}:request", "next_step:0") == "2"
    assert await _events(redis, "r") == [
        {"index": 0, "text": "ab", "token_ids": [7, 8], "finish_reason": None},
        {"index": 0, "text": "c", "token_ids": [9], "finish_reason": "stop"},
    ]
    spec = json.loads(await redis.hget("headrace:{r}:request", "spec") or "")
    assert spec["sampling"]["seed"] == 2**64 - 1
    assert spec["prompt_token_ids"] == [1, 2]


async def test_the_same_step_again_changes_nothing(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await store.commit("r", STEP_0)
    await store.commit("r", STEP_0)
    assert await _tokens(redis, "r", 0) == ["7", "8"]
    assert len(await _events(redis, "r")) == 1


@pytest.mark.parametrize("step_index", [0, 3, 7])
async def test_a_step_out_of_order_is_refused(store: Store, redis: Redis, step_index: int) -> None:
    await store.create("r", model="m", spec=SPEC)
    await store.commit("r", STEP_0)
    await store.commit("r", STEP_1)
    with pytest.raises(StaleStep):
        await store.commit("r", replace(STEP_0, step_index=step_index))
    assert await _tokens(redis, "r", 0) == ["7", "8", "9"]


async def test_choices_count_their_own_steps(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await store.commit("r", STEP_0)
    await store.commit("r", replace(STEP_0, index=1, token_ids=(5,)))
    assert await _tokens(redis, "r", 0) == ["7", "8"]
    assert await _tokens(redis, "r", 1) == ["5"]


async def test_a_commit_after_the_lease_expired_is_refused(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await redis.delete("headrace:{r}:owner")  # what expiry does
    with pytest.raises(OwnershipLost):
        await store.commit("r", STEP_0)
    await store.renew(["r"])
    with pytest.raises(OwnershipLost):
        await store.commit("r", STEP_0)
    assert await _tokens(redis, "r", 0) == []


async def test_a_commit_to_another_gateways_request_is_refused(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await redis.set("headrace:{r}:owner", "another:2")
    with pytest.raises(OwnershipLost):
        await store.commit("r", STEP_0)
    assert await redis.get("headrace:{r}:owner") == "another:2"
    assert await _events(redis, "r") == []


async def test_nothing_can_be_committed_after_the_end(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await store.finish("r", "cancelled")
    with pytest.raises(OwnershipLost):
        await store.commit("r", STEP_0)
    assert await redis.hget("headrace:{r}:request", "status") == "cancelled"


async def test_every_key_expires(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    assert 0 < await redis.pttl("headrace:{r}:request") <= 100_000
    await store.commit("r", STEP_0)
    keys = await redis.keys("*")
    assert len(keys) == 4
    assert all([await redis.pttl(key) > 0 for key in keys])


async def test_renewing_prolongs_the_lease(store: Store, redis: Redis) -> None:
    await store.create("r", model="m", spec=SPEC)
    await redis.pexpire("headrace:{r}:owner", 1_000)
    await store.renew(["r"])
    assert await redis.pttl("headrace:{r}:owner") > 5_000


async def test_a_dead_redis_is_a_typed_error_and_its_return_heals() -> None:
    with redis_server() as server:
        store = await Store.connect(server.url, lease_s=10, ttl_s=100)
        await store.create("r", model="m", spec=SPEC)
        await store.commit("r", STEP_0)
        server.kill()
        with pytest.raises(PeerUnavailable):
            await store.commit("r", STEP_1)
        server.start()
        await store.create("s", model="m", spec=SPEC)
        await store.commit("s", STEP_0)
        await store.close()


@pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "nonsense"])
async def test_an_unreachable_redis_ends_the_start_with_a_hint(url: str) -> None:
    with pytest.raises(ConfigError, match="REDIS_URL"):
        await Store.connect(url, lease_s=10, ttl_s=100)
