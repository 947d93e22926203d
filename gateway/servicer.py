"""The public Inference service on the wire: unpack, one call, pack."""

from collections.abc import AsyncIterator

from gateway.events import Delta, Summary
from gateway.inference import Readiness
from gateway.spec import ChatMessage, InferenceRequest
from headrace.errors import InvalidRequest
from headrace.rpc import gateway_pb2, gateway_pb2_grpc
from headrace.rpc.server import Context


class InferenceServicer(gateway_pb2_grpc.InferenceServicer):
    """Serves one gateway."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Stream one request; it ends when the call does."""
        generation = await self._readiness.inference.generate(_request_from_message(request))
        num_unfinished = generation.spec.num_choices
        last = gateway_pb2.GenerateResponse(request_id=generation.request_id)
        try:
            async for event in generation:
                if isinstance(event, Summary):
                    last.usage.CopyFrom(_usage_to_message(event))
                    yield last
                    return
                num_unfinished -= event.finish_reason is not None
                last = _delta_to_message(event, generation.request_id)
                if num_unfinished:  # the last message waits for the usage
                    yield last
        finally:
            generation.cancel()

    async def Cancel(
        self, request: gateway_pb2.CancelRequest, context: Context
    ) -> gateway_pb2.CancelResponse:
        """Cancel a request by its id."""
        was_live = self._readiness.inference.cancel(request.request_id)
        return gateway_pb2.CancelResponse(was_live=was_live)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """Tell what is served."""
        inference = self._readiness.inference
        model = gateway_pb2.Model(
            name=inference.model_name, max_context_tokens=inference.max_context_tokens
        )
        return gateway_pb2.ListModelsResponse(models=[model])


def _request_from_message(message: gateway_pb2.GenerateRequest) -> InferenceRequest:
    return InferenceRequest(
        operation="chat" if message.WhichOneof("input") == "chat" else "text_completion",
        prompt=_prompt_from_message(message),
        model=message.model or None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        num_choices=message.n if message.HasField("n") else 1,
        ignore_eos=message.ignore_eos,
        gamma=message.gamma if message.HasField("gamma") else None,
    )


def _prompt_from_message(
    message: gateway_pb2.GenerateRequest,
) -> str | tuple[int, ...] | tuple[ChatMessage, ...]:
    kind = message.WhichOneof("input")
    if kind == "prompt":
        return message.prompt
    if kind == "tokens":
        return tuple(message.tokens.token_ids)
    if kind == "chat":
        return tuple(
            ChatMessage(role=turn.role, content=turn.content) for turn in message.chat.messages
        )
    raise InvalidRequest("the input is missing: set prompt, chat or tokens", param="input")


def _delta_to_message(delta: Delta, request_id: str) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason or "",
    )


def _usage_to_message(summary: Summary) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        num_steps=summary.num_steps,
        num_draft_tokens=summary.num_draft_tokens,
        num_accepted_tokens=summary.num_accepted_tokens,
    )
