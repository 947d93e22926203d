"""The HTTP routes. Each unpacks, makes one call, packs."""

import time

from opentelemetry import context as otel_context
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.api import ChatCompletionBody, CompletionBody, parse
from gateway.events import Delta, Summary
from gateway.generation import Generation
from gateway.inference import Readiness
from gateway.responses import ChatShape, CompletionShape, ResponseShape, error_body, error_fields
from gateway.stream import GenerationStream
from gateway.task_group import task_group
from headrace import telemetry
from headrace.errors import HeadraceError

_MAX_BODY_BYTES = 4 * 1024 * 1024
_RETRY_AFTER_S = 2
_RETRYABLE = (429, 503)


class Routes:
    """The handlers of one gateway."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._created_s = int(time.time())

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatCompletionBody, await _read_body(request))
        return await self._answer(request, body, ChatShape)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = parse(CompletionBody, await _read_body(request))
        return await self._answer(request, body, CompletionShape)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        self._readiness.inference.check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """GET /health: 200 when requests may come in, else 503."""
        _ = self._readiness.inference
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = self._readiness.inference.render_metrics()
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def _answer(
        self,
        request: Request,
        body: ChatCompletionBody | CompletionBody,
        shape_type: type[ResponseShape],
    ) -> Response:
        inference = self._readiness.inference
        token = otel_context.attach(telemetry.extract(dict(request.headers)))
        try:
            generation = await inference.generate(body.to_request())
        finally:
            otel_context.detach(token)
        shape = shape_type(generation, inference.model_name)
        if body.stream:
            return GenerationStream(generation, shape, includes_usage=body.includes_usage)
        return JSONResponse(await _collect(request, generation, shape))

    def _model(self) -> dict[str, object]:
        inference = self._readiness.inference
        return {
            "id": inference.model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "headrace",
            "max_model_len": inference.max_context_tokens,
        }


def create_app(readiness: Readiness) -> Starlette:
    """The application."""
    routes = Routes(readiness)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
        ],
        exception_handlers={
            HeadraceError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )


async def _read_body(request: Request) -> bytes:
    """The body; what is too large is refused before it is all in memory."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {_MAX_BODY_BYTES} bytes: shorten it")
    return bytes(body)


async def _collect(
    request: Request, generation: Generation, shape: ResponseShape
) -> dict[str, object]:
    """The whole answer; the generation is cancelled when the client goes first."""
    deltas: list[Delta] = []
    answer: dict[str, object] = {}
    try:
        async with task_group() as group:
            watching = group.create_task(_cancel_on_disconnect(request, generation))
            async for event in generation:
                if isinstance(event, Summary):
                    answer = shape.whole(deltas, event)
                else:
                    deltas.append(event)
            watching.cancel()
    finally:
        generation.cancel()
    return answer


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.http_status in _RETRYABLE else None
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {request.method} {request.url.path[:200]} here"
    if error.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method}"
    body = error_fields(message, kind="invalid_request_error", code=f"http_{error.status_code}")
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    body = error_fields("internal error", kind="server_error", code="internal_error")
    return JSONResponse(body, status_code=500)
