"""Asks a running gateway one question over its HTTP API and reads the streamed answer."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.errors import HeadraceError, InvalidRequest, PeerUnavailable

_TIMEOUT = httpx.Timeout(30.0, read=120.0)
"""The gateway sends keepalive comments in silent periods, so two silent minutes mean it is gone."""
_NOT_OURS = "the server does not answer as a Headrace gateway does: check --url"
_CHAT = "/v1/chat/completions"
_PLAIN = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask and how to sample the answer; None leaves a value to the gateway."""

    prompt: str
    system: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    gamma: int | str | None = None
    """Draft tokens a step: a number or "auto"."""

    def body(self, model: str) -> dict[str, Any]:
        """The fields that chat and plain completion share."""
        optional = {
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "gamma": self.gamma,
        }
        return {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in optional.items() if value is not None},
        }

    def messages(self) -> list[dict[str, str]]:
        """The prompt as a conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back; `text` grows while it streams."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)


async def ask(base_url: str, question: Question, on_text: Callable[[str], None]) -> Answer:
    """Ask, and hand on the text as it comes.

    A model without a chat template continues the prompt as it is.

    Args:
        base_url: The gateway, with or without a final /v1.
        question: What to ask.
        on_text: Called with every piece of text.

    Raises:
        InvalidRequest: The gateway refuses the question.
        PeerUnavailable: There is no gateway, or it went away.
        HeadraceError: The request failed on the way.
    """
    base_url = base_url.rstrip("/").removesuffix("/v1")
    try:
        async with httpx.AsyncClient(
            base_url=base_url, timeout=_TIMEOUT, trust_env=False
        ) as client:
            model = await _served_model(client)
            body = question.body(model)
            try:
                chat = {**body, "messages": question.messages()}
                return await _stream(client, _CHAT, chat, on_text)
            except InvalidRequest as error:
                if _PLAIN not in error.message:
                    raise
                return await _stream(client, _PLAIN, {**body, "prompt": question.prompt}, on_text)
    except (httpx.TransportError, httpx.InvalidURL):
        raise PeerUnavailable(
            "the gateway does not answer: start it with `headrace serve`, or check --url"
        ) from None


async def _served_model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    if response.is_error:
        raise _error(response.content, response.status_code)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise InvalidRequest(_NOT_OURS) from None


async def _stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], on_text: Callable[[str], None]
) -> Answer:
    answer = Answer()
    async with client.stream("POST", path, json=body) as response:
        if response.is_error:
            raise _error(await response.aread(), response.status_code)
        async for chunk in _chunks(response):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if path == _CHAT else choice["text"]
                if text:
                    answer.text += text
                    on_text(text)
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
            answer.usage = chunk.get("usage") or answer.usage
            answer.metrics = chunk.get("metrics") or answer.metrics
    if answer.finish_reason is None:
        raise PeerUnavailable("the answer broke off: the gateway went away")
    return answer


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of every server-sent event; comments and [DONE] are left out."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise HeadraceError(chunk["error"]["message"])
        yield chunk


def _error(content: bytes, status: int) -> HeadraceError:
    """The error that a response other than 2xx stands for."""
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"status {status}: {_NOT_OURS}"
    return InvalidRequest(message) if status == httpx.codes.BAD_REQUEST else HeadraceError(message)
