"""The answer is put together from the gateway's chunks; its refusals become one clear error."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from headrace.cli.chat import Answer, Question, ask
from headrace.errors import HeadraceError, InvalidRequest, PeerUnavailable

CHAT = "/v1/chat/completions"
METRICS = {"speculative_decoding": {"num_spec_steps": 3}, "headrace": {"sweeps": 3}}


class Gateway(ThreadingHTTPServer):
    """Answers as OpenAI's API reference lays down: chunks, a usage chunk, [DONE]."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, tuple[int, str]] = {}
        """Status and message by path."""
        self.models = json.dumps({"data": [{"id": "tiny"}]})
        self.breaks_off = False
        self.error_in_stream: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def chunks(self, path: str) -> Iterator[str]:
        for text in ("Par", "is", "."):
            yield self._chunk(path, text, finish_reason=None)
            if self.error_in_stream:
                yield json.dumps({"error": {"message": self.error_in_stream}})
        if self.breaks_off:
            return
        yield self._chunk(path, "", finish_reason="stop")
        yield json.dumps({"choices": [], "usage": {"completion_tokens": 3}, "metrics": METRICS})
        yield "[DONE]"

    def _chunk(self, path: str, text: str, *, finish_reason: str | None) -> str:
        content = {"delta": {"content": text}} if path == CHAT else {"text": text}
        return json.dumps({"choices": [{**content, "finish_reason": finish_reason}], "usage": None})


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._answer(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.path in self.server.refusals:
            status, message = self.server.refusals[self.path]
            self._answer(status, json.dumps({"error": {"message": message}}))
            return
        events = [f"data: {chunk}\n\n" for chunk in self.server.chunks(self.path)]
        self._answer(200, ": ping\n\n" + "".join(events))

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - inherited
        pass


@contextmanager
def running_gateway() -> Iterator[Gateway]:
    with Gateway() as gateway:
        thread = Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield gateway
        finally:
            gateway.shutdown()
            thread.join()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with running_gateway() as running:
        yield running


async def ask_once(url: str, **options: Any) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    answer = await ask(url, Question(prompt="Capital of France?", **options), pieces.append)
    return answer, pieces


async def test_the_streamed_pieces_are_the_answer(gateway: Gateway) -> None:
    answer, pieces = await ask_once(gateway.url)
    assert pieces == ["Par", "is", "."]
    assert answer == Answer(
        text="Paris.", finish_reason="stop", usage={"completion_tokens": 3}, metrics=METRICS
    )


async def test_options_travel_and_absent_ones_do_not(gateway: Gateway) -> None:
    await ask_once(gateway.url, gamma="auto", seed=7, system="Be brief.", max_tokens=9)
    path, body = gateway.requests[0]
    assert path == CHAT
    assert (body["model"], body["gamma"], body["seed"], body["max_tokens"]) == (
        "tiny",
        "auto",
        7,
        9,
    )
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert not {"top_p", "top_k"} & body.keys()


async def test_a_url_may_end_in_v1(gateway: Gateway) -> None:
    answer, _ = await ask_once(f"{gateway.url}/v1/")
    assert answer.text == "Paris."


async def test_a_model_without_chat_template_continues_the_prompt(gateway: Gateway) -> None:
    gateway.refusals[CHAT] = (400, "no chat template: use /v1/completions")
    answer, _ = await ask_once(gateway.url)
    assert answer.text == "Paris."
    path, body = gateway.requests[1]
    assert path == "/v1/completions"
    assert body["prompt"] == "Capital of France?"
    assert "messages" not in body


async def test_a_refusal_is_the_gateways_message(gateway: Gateway) -> None:
    gateway.refusals[CHAT] = (400, "max_tokens is beyond the context")
    with pytest.raises(InvalidRequest, match="beyond the context"):
        await ask_once(gateway.url)


async def test_an_error_in_the_stream_is_raised(gateway: Gateway) -> None:
    gateway.error_in_stream = "the target does not answer"
    with pytest.raises(HeadraceError, match="the target does not answer"):
        await ask_once(gateway.url)


async def test_an_answer_that_breaks_off_is_an_error(gateway: Gateway) -> None:
    gateway.breaks_off = True
    with pytest.raises(PeerUnavailable, match="broke off"):
        await ask_once(gateway.url)


async def test_no_gateway_is_a_clear_error() -> None:
    with running_gateway() as gateway:
        url = gateway.url
    for wrong in (url, "nonsense", "http://"):
        with pytest.raises(PeerUnavailable, match="headrace serve"):
            await ask_once(wrong)


@pytest.mark.parametrize("answer", ["<html>", "{}", "[]", '{"data": []}'])
async def test_another_kind_of_server_is_a_clear_error(gateway: Gateway, answer: str) -> None:
    gateway.models = answer
    with pytest.raises(InvalidRequest, match="check --url"):
        await ask_once(gateway.url)
