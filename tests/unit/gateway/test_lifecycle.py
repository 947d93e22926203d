"""Queueing, disconnects, shutdown, and what happens when a peer or the store is away."""

import asyncio
from pathlib import Path

import httpx
import pytest
from redis import Redis

from gateway.app import create_app
from gateway.config import Config
from gateway.gateway import running_gateway
from gateway.http_server import HttpServer
from gateway.inference import Readiness
from gateway.spec import InferenceRequest
from headrace.config import Environment
from headrace.errors import (
    ConfigError,
    HeadraceError,
    KVExhausted,
    PeerUnavailable,
    RequestCancelled,
    UnknownSequence,
)
from tests.support.eventually import assert_eventually
from tests.support.fake_peers import FakeDraft, FakeTarget, model_info
from tests.support.gateway_rig import MODEL, GatewayRig, gateway_rig

LONG = {"prompt": "a", "max_tokens": 200, "gamma": 0}
Post = asyncio.Task[httpx.Response]


def _post(rig: GatewayRig, **body: object) -> Post:
    return asyncio.create_task(rig.http.post("/v1/completions", json={**LONG, **body}))


async def test_a_full_queue_refuses_with_retry_after(toy_model_dir: Path, redis_url: str) -> None:
    settings = {"MAX_LIVE_SEQUENCES": "1", "MAX_WAITING_SEQUENCES": "1"}
    async with gateway_rig(toy_model_dir, redis_url, settings=settings) as rig:
        rig.target.gate.clear()
        first, second = _post(rig), _post(rig)
        await assert_eventually(lambda: rig.target.num_at_gate == 1)
        refused = await rig.http.post("/v1/completions", json=LONG)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await rig.http.get("/health")).status_code == 200
        assert rig.target.num_opened == 1
        rig.target.gate.set()
        assert [(await post).status_code for post in (first, second)] == [200, 200]


async def test_more_choices_than_live_places_take_turns(
    toy_model_dir: Path, redis_url: str
) -> None:
    async with gateway_rig(toy_model_dir, redis_url, settings={"MAX_LIVE_SEQUENCES": "2"}) as rig:
        answer = await rig.complete("a", n=5, max_tokens=3)
        assert [choice["text"] for choice in answer["choices"]] == ["bcd"] * 5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_frees_the_sequence(rig: GatewayRig, stream: bool) -> None:
    rig.target.gate.clear()
    post = _post(rig, stream=stream, n=2)
    await assert_eventually(lambda: rig.target.num_at_gate == 2)
    post.cancel()
    await assert_eventually(lambda: not rig.target.opened and rig.target.num_at_gate == 0)
    rig.target.gate.set()
    assert await rig.text("a", max_tokens=2) == "bc"


async def test_a_disconnect_while_queued_gives_the_place_back(
    toy_model_dir: Path, redis_url: str
) -> None:
    settings = {"MAX_LIVE_SEQUENCES": "1", "MAX_WAITING_SEQUENCES": "1"}
    async with gateway_rig(toy_model_dir, redis_url, settings=settings) as rig:
        rig.target.gate.clear()
        running, queued = _post(rig), _post(rig)
        await assert_eventually(lambda: rig.target.num_at_gate == 1)
        queued.cancel()

        async def waiting() -> str:
            return (await rig.http.get("/metrics")).text

        while 'num_requests_waiting{model_name="toy-target"} 1.0' in await waiting():
            pass
        again = _post(rig, max_tokens=2)
        rig.target.gate.set()
        assert (await running).status_code == (await again).status_code == 200


async def test_a_request_cancelled_before_its_first_step_ends_too(rig: GatewayRig) -> None:
    request = InferenceRequest(prompt="a", operation="chat")
    generation = await rig.gateway.readiness.inference.generate(request)
    generation.cancel()
    with pytest.raises(RequestCancelled):
        await anext(aiter(generation))
    running = 'num_requests_running{model_name="toy-target"} 0.0'
    assert running in (await rig.http.get("/metrics")).text


async def test_nothing_is_committed_after_a_disconnect(rig: GatewayRig, redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.flushall()
        rig.target.gate.clear()
        post = _post(rig)
        await assert_eventually(lambda: rig.target.num_at_gate == 1)
        post.cancel()
        await assert_eventually(
            lambda: [redis.hget(key, "status") for key in redis.keys("*:request")] == ["cancelled"]
        )
        assert not redis.keys("*:owner")
        assert not redis.keys("*:tokens:*")


async def test_draining_finishes_the_live_and_refuses_the_new(rig: GatewayRig) -> None:
    rig.target.gate.clear()
    live = _post(rig, max_tokens=3)
    await assert_eventually(lambda: rig.target.num_at_gate == 1)
    draining = asyncio.create_task(rig.gateway.drain(grace_s=30))
    while (health := await rig.http.get("/health")).status_code == 200:
        pass
    assert health.status_code == 503
    assert (await rig.http.post("/v1/completions", json=LONG)).status_code == 503
    rig.target.gate.set()
    await draining
    assert (await live).json()["choices"][0]["text"] == "bcd"


async def test_draining_cancels_what_outlives_the_grace(rig: GatewayRig) -> None:
    rig.target.gate.clear()
    live = _post(rig)
    await assert_eventually(lambda: rig.target.num_at_gate == 1)
    await rig.gateway.drain(grace_s=0)
    response = await live
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]
    await assert_eventually(lambda: not rig.target.opened)


async def test_without_a_draft_decoding_is_plain(toy_model_dir: Path, redis_url: str) -> None:
    async with gateway_rig(toy_model_dir, redis_url, has_draft=False) as rig:
        answer = await rig.complete("a", max_tokens=5)
        assert answer["choices"][0]["text"] == "bcdef"
        assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
        assert rig.draft.num_opened == 0


@pytest.mark.parametrize(
    "error", [PeerUnavailable("away"), KVExhausted("full"), HeadraceError("bug")]
)
async def test_a_failing_draft_makes_plain_steps(rig: GatewayRig, error: HeadraceError) -> None:
    rig.draft.errors += [error] * 4
    answer = await rig.complete("a", max_tokens=5, gamma=2)
    assert answer["choices"][0]["text"] == "bcdef"
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    await assert_eventually(lambda: not rig.draft.opened)


async def test_a_draft_that_lost_the_sequence_gets_it_again(rig: GatewayRig) -> None:
    rig.draft.errors.append(UnknownSequence("lost"))
    answer = await rig.complete("a", max_tokens=5, gamma=4)
    assert answer["choices"][0]["text"] == "bcdef"
    assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 4
    assert rig.draft.num_opened == 2


async def test_a_shorter_draft_context_ends_in_plain_decoding(
    toy_model_dir: Path, redis_url: str
) -> None:
    draft = FakeDraft(info=model_info("short", max_context_tokens=12))
    async with gateway_rig(toy_model_dir, redis_url, draft=draft) as rig:
        assert await rig.text("a", max_tokens=25) == "bcdefghijklmnopqrstuvwxyz"
        assert draft.gammas
        assert sum(gamma + 1 for gamma in draft.gammas) <= 12
        assert await rig.text("a" * 12, max_tokens=3) == "bcd"


@pytest.mark.parametrize(
    "errors",
    [
        [UnknownSequence("lost")],
        [PeerUnavailable("away")] * 2,
        [KVExhausted("full"), UnknownSequence("lost"), UnknownSequence("lost")],
    ],
)
async def test_a_target_that_comes_back_goes_on_with_the_same_text(
    rig: GatewayRig, errors: list[HeadraceError]
) -> None:
    rig.draft.num_right = 1
    rig.target.errors += errors
    assert await rig.text("a", max_tokens=9) == "bcdefghij"


async def test_a_target_that_always_loses_the_sequence_is_given_up(rig: GatewayRig) -> None:
    rig.target.errors += [UnknownSequence("lost")] * 100
    response = await rig.http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 404


async def test_a_full_kv_cache_makes_the_request_wait(toy_model_dir: Path, redis_url: str) -> None:
    target = FakeTarget(info=model_info(MODEL, kv_capacity_tokens=40))
    async with gateway_rig(toy_model_dir, redis_url, target=target) as rig:
        answers = await asyncio.gather(
            *(rig.text("a", max_tokens=25, ignore_eos=True) for _ in range(3))
        )
        assert answers == ["bcdefghijklmnopqrstuvwxyz"] * 3
        refused = await rig.complete("a", max_tokens=40)
        assert refused["error"]["param"] == "max_tokens"


async def test_a_request_ends_at_its_deadline(toy_model_dir: Path, redis_url: str) -> None:
    async with gateway_rig(toy_model_dir, redis_url, settings={"REQUEST_TIMEOUT_S": "1"}) as rig:
        rig.target.gate.clear()
        response = await rig.http.post("/v1/completions", json=LONG)
        assert response.status_code == 504
        await assert_eventually(lambda: not rig.target.opened)


async def test_a_stolen_request_ends_with_a_conflict(rig: GatewayRig, redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.flushall()
        rig.target.gate.clear()
        post = _post(rig)
        await assert_eventually(lambda: rig.target.num_at_gate == 1)
        (owner_key,) = redis.keys("*:owner")
        redis.set(owner_key, "another:2")
        rig.target.gate.set()
        response = await post
        assert response.status_code == 409
        assert redis.get(owner_key) == "another:2"
        assert not redis.keys("*:tokens:*")


async def test_another_tokenizer_ends_the_start_with_the_reason(
    toy_model_dir: Path, redis_url: str
) -> None:
    draft = FakeDraft(info=model_info("odd", tokenizer_fingerprint="other"))
    with pytest.raises(ConfigError, match="another tokenizer"):
        async with gateway_rig(toy_model_dir, redis_url, draft=draft):
            pass


async def test_a_target_that_never_answers_ends_the_start(
    toy_model_dir: Path, redis_url: str, tmp_path: Path
) -> None:

    config = Config.from_environment(
        Environment(
            {
                "HEADRACE_TARGET_DIR": str(toy_model_dir),
                "HEADRACE_TARGET_ADDRESS": "unix:/nowhere/target.sock",
                "HEADRACE_HTTP_ADDRESS": "127.0.0.1:0",
                "HEADRACE_GRPC_ADDRESS": "127.0.0.1:0",
                "HEADRACE_START_TIMEOUT_S": "1",
                "REDIS_URL": redis_url,
            }
        )
    )
    with pytest.raises(ConfigError, match="HEADRACE_TARGET_ADDRESS"):
        async with running_gateway(config):
            pass


async def test_a_taken_port_ends_the_start_with_a_hint(rig: GatewayRig) -> None:

    with pytest.raises(ConfigError, match="HEADRACE_HTTP_ADDRESS"):
        HttpServer(create_app(Readiness()), address=rig.gateway.http_address)


async def test_health_is_503_until_the_peers_are_ready() -> None:

    transport = httpx.ASGITransport(create_app(Readiness()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        response = await client.get("/health")
        assert response.status_code == 503
        assert "starting" in response.json()["error"]["message"]
