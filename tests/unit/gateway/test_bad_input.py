"""Every bad request gets a 4xx that says what to do, and harms nobody."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateway_rig import GatewayRig, gateway_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
_BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [272]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": [{}] * 1_000_000}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "a" * 256}, "prompt"),
    ({"prompt": "a" * 100_000}, "prompt"),
    ({**PROMPT, "max_tokens": 0}, "max_tokens"),
    ({**PROMPT, "max_tokens": -5}, "max_tokens"),
    ({**PROMPT, "max_tokens": 256}, "max_tokens"),
    ({**PROMPT, "max_tokens": 10**12}, "max_tokens"),
    ({**PROMPT, "max_tokens": "5"}, "max_tokens"),
    ({**PROMPT, "max_tokens": 5.5}, "max_tokens"),
    ({**PROMPT, "max_tokens": True}, "max_tokens"),
    ({**PROMPT, "temperature": -0.1}, "temperature"),
    ({**PROMPT, "temperature": 2.1}, "temperature"),
    ({**PROMPT, "temperature": 10**400}, "temperature"),
    ({**PROMPT, "temperature": "hot"}, "temperature"),
    ({**PROMPT, "top_p": 0}, "top_p"),
    ({**PROMPT, "top_p": 1.1}, "top_p"),
    ({**PROMPT, "top_k": -2}, "top_k"),
    ({**PROMPT, "top_k": 1.5}, "top_k"),
    ({**PROMPT, "n": 0}, "n"),
    ({**PROMPT, "n": 17}, "n"),
    ({**PROMPT, "n": 10**9}, "n"),
    ({**PROMPT, "seed": 2**64}, "seed"),
    ({**PROMPT, "seed": -(2**63) - 1}, "seed"),
    ({**PROMPT, "seed": "x"}, "seed"),
    ({**PROMPT, "stop": ""}, "stop"),
    ({**PROMPT, "stop": ["a", ""]}, "stop"),
    ({**PROMPT, "stop": ["a"] * 5}, "stop"),
    ({**PROMPT, "stop": ["a" * 1025]}, "stop"),
    ({**PROMPT, "stop": [1]}, "stop"),
    ({**PROMPT, "stop": [1] * 1_000_000}, "stop"),
    ({**PROMPT, "gamma": -1}, "gamma"),
    ({**PROMPT, "gamma": 65}, "gamma"),
    ({**PROMPT, "gamma": "many"}, "gamma"),
    ({**PROMPT, "stream": "yes"}, "stream"),
    ({**PROMPT, "stream_options": {"chunks": 1}}, "chunks"),
    ({**PROMPT, "logprobs": 0}, "logprobs"),
    ({**PROMPT, "echo": True}, "echo"),
    ({**PROMPT, "best_of": 2}, "best_of"),
    ({**PROMPT, "suffix": "x"}, "suffix"),
    ({**PROMPT, "logit_bias": {"5": 1}}, "logit_bias"),
    ({**PROMPT, "frequency_penalty": 0.5}, "frequency_penalty"),
    ({**PROMPT, "presence_penalty": -0.5}, "presence_penalty"),
    ({**PROMPT, "min_p": 0.1}, "min_p"),
    ({**PROMPT, "temprature": 1}, "temprature"),
    ({**PROMPT, "messages": []}, "messages"),
    ({**PROMPT, **{f"x{i}": 1 for i in range(100_000)}}, "x0"),
]
_BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": CHAT["messages"] * 100_000}, "messages"),
    ({"messages": [{"role": "user", "content": [{}] * 1_000_000}]}, "messages"),
    ({**CHAT, "prompt": "a"}, "prompt"),
    ({**CHAT, "max_completion_tokens": 0}, "max_tokens"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "tool_choice": "auto"}, "tool_choice"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ({**CHAT, "logprobs": True}, "logprobs"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(toy_model_dir: Path, redis_url: str) -> AsyncIterator[GatewayRig]:
    async with gateway_rig(toy_model_dir, redis_url) as rig:
        yield rig


def _name(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:60]} of {len(text)} characters"


@pytest.mark.parametrize(("body", "param"), _BAD_COMPLETIONS, ids=_name)
async def test_a_bad_completion_is_refused_by_field(
    rig: GatewayRig, body: dict[str, Any], param: str
) -> None:
    await _assert_refused(rig, "/v1/completions", body, param)


@pytest.mark.parametrize(("body", "param"), _BAD_CHATS, ids=_name)
async def test_a_bad_chat_is_refused_by_field(
    rig: GatewayRig, body: dict[str, Any], param: str
) -> None:
    await _assert_refused(rig, "/v1/chat/completions", body, param)


async def _assert_refused(rig: GatewayRig, path: str, body: dict[str, Any], param: str) -> None:
    response = await rig.http.post(path, json=body)
    assert response.status_code in (400, 413)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    if response.status_code == 400:
        assert error["param"].split(".")[0] == param
        assert param in error["message"] or "prompt" in error["message"]
        assert len(error["message"]) <= 500
    assert not rig.target.opened


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"metadata":' * 50_000,
    ],
)
async def test_a_body_that_is_no_request_is_refused(rig: GatewayRig, raw: bytes) -> None:
    response = await rig.http.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_beyond_four_mebibytes_is_refused(rig: GatewayRig) -> None:
    response = await rig.http.post("/v1/completions", content=b" " * (4 * 1024 * 1024 + 1))
    assert response.status_code == 413
    assert "shorten" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/nothing", 404),
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_a_wrong_route_has_the_same_error_body(
    rig: GatewayRig, method: str, path: str, status: int
) -> None:
    response = await rig.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_unknown_model_is_told_the_known_one(rig: GatewayRig) -> None:
    response = await rig.http.post("/v1/completions", json={**PROMPT, "model": "m" * 10_000})
    assert response.status_code == 404
    assert "toy-target" in response.json()["error"]["message"]
    assert len(response.text) < 1_000


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False},
        {"stop": None, "seed": None, "stream": None, "n": None, "logit_bias": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0, "best_of": 1},
        {"logprobs": None, "echo": False, "suffix": None, "top_k": -1},
        {"top_k": 10**12, "gamma": "auto", "stream_options": None},
    ],
)
async def test_values_that_ask_for_nothing_are_let_through(
    rig: GatewayRig, extra: dict[str, Any]
) -> None:
    assert await rig.text("a", max_tokens=2, **extra) == "bc"


async def test_text_parts_are_joined(rig: GatewayRig) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    bodies = [{"messages": [{"role": "user", "content": content}]} for content in ("hi", parts)]
    answers = [
        (await rig.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})).json()
        for body in bodies
    ]
    assert answers[0]["usage"] == answers[1]["usage"]


async def test_errors_name_no_address(rig: GatewayRig) -> None:
    raw = json.dumps({"prompt": "a", "model": "x"})
    response = await rig.http.post("/v1/completions", content=raw)
    assert "127.0.0.1" not in response.text


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("gamma", "AUTO", 'a whole number from 0 to 64, or "auto"'),
        ("stop", ["a", "b", "c", "d", "e"], "a list of at most 4 texts"),
        ("prompt", 5, "a text or a list of token ids"),
    ],
)
async def test_a_field_of_several_types_says_all_of_them(
    rig: GatewayRig, field: str, value: object, hint: str
) -> None:
    response = await rig.http.post("/v1/completions", json={"prompt": "a", field: value})
    assert response.status_code == 400
    assert hint in response.json()["error"]["message"]


async def test_an_image_is_refused_as_one(rig: GatewayRig) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "only content parts of type text" in response.json()["error"]["message"]
