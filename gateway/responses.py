"""The bodies that the OpenAI-compatible API answers with. Shapes only."""

import re
from collections.abc import Mapping
from typing import Any

from gateway.events import Delta, FinishReason, Summary
from gateway.generation import Generation
from headrace.errors import HeadraceError, InvalidRequest, QueueFull, Unauthenticated, UnknownModel

Json = dict[str, Any]

_ERROR_TYPES: Mapping[type[HeadraceError], str] = {
    InvalidRequest: "invalid_request_error",
    UnknownModel: "invalid_request_error",
    Unauthenticated: "authentication_error",
    QueueFull: "rate_limit_error",
}
_ERROR_CODES: Mapping[type[HeadraceError], str] = {UnknownModel: "model_not_found"}


class ResponseShape:
    """How one request's answer looks; all parts of it share id, created and model."""

    object_name: str
    chunk_object_name: str

    def __init__(self, generation: Generation, model_name: str) -> None:
        self._generation = generation
        self._model_name = model_name
        self._begun: set[int] = set()

    def chunk(self, delta: Delta, *, includes_usage: bool) -> Json:
        """One event of a stream."""
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        chunk = {
            **self._head(self.chunk_object_name),
            "choices": [self._chunk_choice(delta, is_first=is_first)],
        }
        return {**chunk, "usage": None} if includes_usage else chunk

    def usage_chunk(self, summary: Summary) -> Json:
        """The event after the last choice's end."""
        return {
            **self._head(self.chunk_object_name),
            "choices": [],
            "usage": _usage(summary),
            "metrics": _metrics(summary),
        }

    def whole(self, deltas: list[Delta], summary: Summary) -> Json:
        """The answer in one piece."""
        choices = []
        for index in range(self._generation.spec.num_choices):
            own = [delta for delta in deltas if delta.index == index]
            text = "".join(delta.text for delta in own)
            choices.append(self._choice(index, text, own[-1].finish_reason))
        return {
            **self._head(self.object_name),
            "choices": choices,
            "usage": _usage(summary),
            "metrics": _metrics(summary),
        }

    def _head(self, object_name: str) -> Json:
        return {
            "id": self._generation.request_id,
            "object": object_name,
            "created": self._generation.created_s,
            "model": self._model_name,
        }

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None) -> Json:
        raise NotImplementedError

    def _chunk_choice(self, delta: Delta, *, is_first: bool) -> Json:
        raise NotImplementedError


class ChatShape(ResponseShape):
    """Of /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def _chunk_choice(self, delta: Delta, *, is_first: bool) -> Json:
        content: Json = {"role": "assistant", "content": delta.text} if is_first else {}
        if delta.text:
            content["content"] = delta.text
        return {
            "index": delta.index,
            "delta": content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }


class CompletionShape(ResponseShape):
    """Of /v1/completions."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _chunk_choice(self, delta: Delta, *, is_first: bool) -> Json:
        return self._choice(delta.index, delta.text, delta.finish_reason)


def error_body(error: HeadraceError) -> Json:
    """The OpenAI error body."""
    kind = next((_ERROR_TYPES[base] for base in type(error).__mro__ if base in _ERROR_TYPES), None)
    code = _ERROR_CODES.get(type(error), _snake_case(type(error).__name__))
    return error_fields(
        error.message,
        kind=kind or "server_error",
        code=code,
        param=getattr(error, "param", None),
    )


def error_fields(message: str, *, kind: str, code: str, param: str | None = None) -> Json:
    """An error body from its parts."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _usage(summary: Summary) -> Json:
    return {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }


def _metrics(summary: Summary) -> Json:
    return {
        "speculative_decoding": {
            "mean_acceptance_length": summary.mean_acceptance_length,
            "draft_acceptance_rate": summary.draft_acceptance_ratio,
            "acceptance_histogram": list(summary.acceptance_histogram),
            "num_spec_steps": summary.num_spec_steps,
            "num_accepted_draft_tokens": summary.num_accepted_tokens,
            "num_draft_tokens": summary.num_draft_tokens,
        },
        "headrace": {
            "sweeps": summary.num_sweeps,
            "bytes_streamed": summary.bytes_streamed,
            "stream_gb_per_s": summary.stream_gb_per_s,
            "tokens_per_s": summary.tokens_per_s,
            "ttft_s": summary.ttft_s,
            "acceptance_rate": summary.acceptance_rate,
            "block_efficiency": summary.block_efficiency,
        },
    }


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
