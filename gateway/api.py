"""The bodies of the OpenAI-compatible API. Types only; the rules on values are the intake's.

Whatever a body asks for and this gateway cannot do is refused by name, never dropped in silence.
Lists are bounded and the first unknown name ends the reading: pydantic would otherwise collect one
error for each of the millions of items that a hostile body has room for.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.intake import MAX_GAMMA, MAX_MESSAGES, MAX_STOPS
from gateway.spec import ChatMessage, InferenceRequest
from headrace.errors import InvalidRequest

_ALWAYS_IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
"""Notes of the client to itself: they change nothing that is generated."""

# Not supported yet: only the values that ask for nothing are let through.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
}

# Of a field with several types the validator tells only why the first did not fit.
_WANTED = {
    "gamma": f'a whole number from 0 to {MAX_GAMMA}, or "auto"',
    "prompt": "a text or a list of token ids",
    "stop": f"a text or a list of at most {MAX_STOPS} texts",
}

_DEFAULT_COMPLETION_TOKENS = 16  # as the OpenAI reference has it for /v1/completions

_Float = Annotated[float, Field(allow_inf_nan=False)]
_Stops = Annotated[list[str], Field(max_length=MAX_STOPS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_names(cls, body: Any) -> Any:
        names = body if _is_object(body) else ()
        unknown = next((name[:100] for name in names if name not in cls.model_fields), None)
        if unknown is not None:
            raise InvalidRequest(f"{unknown} is an unknown parameter: leave it out", param=unknown)
        return body


class StreamOptions(_Strict):
    """What a stream carries besides the text."""

    include_usage: bool | None = None


class _Body(_Strict):
    """What both endpoints take; an explicit null is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | _Stops | None = None
    max_tokens: int | None = None
    temperature: _Float | None = None
    top_p: _Float | None = None
    top_k: int | None = None
    ignore_eos: bool | None = None
    gamma: int | Literal["auto"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not _is_object(body):
            raise InvalidRequest("the body must be a JSON object")
        for name, neutral in _NEUTRAL_VALUES.items():
            value = body.get(name)
            if value is not None and not any(_is_same(value, other) for other in neutral):
                raise InvalidRequest(
                    f"{name} is not supported yet: leave it out of the request", param=name
                )
        dropped = {*_NEUTRAL_VALUES, *_ALWAYS_IGNORED}
        return {name: value for name, value in body.items() if name not in dropped}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _fields(self) -> dict[str, Any]:
        """The fields of InferenceRequest that are the same for both endpoints."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "num_choices": self.n,
            "ignore_eos": self.ignore_eos,
            "gamma": None if self.gamma == "auto" else self.gamma,
            "stop": tuple(stop),
        }
        return {name: value for name, value in given.items() if value is not None}


class TextPart(_Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, part: Any) -> Any:
        if _is_object(part) and part.get("type") != "text":
            raise InvalidRequest(
                "messages: only content parts of type text are supported", param="messages"
            )
        return part


_Parts = Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]


class Message(_Strict):
    """One turn; content is text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts
    name: str | None = None

    def to_chat_message(self) -> ChatMessage:
        """As the chat template takes it: "developer" is the newer word for "system"."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role=role, content=content, name=self.name)


class ChatCompletionBody(_Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None

    def to_request(self) -> InferenceRequest:
        """The request that it stands for."""
        fields = self._fields()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        prompt = tuple(message.to_chat_message() for message in self.messages)
        return InferenceRequest(operation="chat", prompt=prompt, **fields)


class CompletionBody(_Body):
    """POST /v1/completions. The prompt is a text, a list of one text, or a list of token ids."""

    prompt: str | list[Any]

    def to_request(self) -> InferenceRequest:
        """The request that it stands for."""
        fields = {"max_tokens": _DEFAULT_COMPLETION_TOKENS, **self._fields()}
        return InferenceRequest(operation="text_completion", prompt=self._one_prompt(), **fields)

    def _one_prompt(self) -> str | tuple[int, ...]:
        if isinstance(self.prompt, str):
            return self.prompt
        if all(type(item) is int for item in self.prompt):
            return tuple(self.prompt)
        if len(self.prompt) > 1:
            raise InvalidRequest(
                "prompt must be one text or token ids: send one request for each text",
                param="prompt",
            )
        (text,) = self.prompt
        if not isinstance(text, str):
            raise InvalidRequest("prompt must be a text or token ids", param="prompt")
        return text


Body = TypeVar("Body", ChatCompletionBody, CompletionBody)


def parse(kind: type[Body], raw: bytes) -> Body:
    """Read a body.

    Raises:
        InvalidRequest: It is no JSON or of the wrong shape; names the first field at fault.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if fault["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not valid JSON: {fault['msg']}") from None
        path = _path(fault["loc"])
        reason = f"{path}: {fault['msg']}"
        if path in _WANTED:
            reason = f"{path} must be {_WANTED[path]}"
        raise InvalidRequest(reason, param=path) from None


def _path(steps: tuple[int | str, ...]) -> str:
    """The field at fault, as in messages.0.content; what follows a name only tells its types."""
    length = 3 if len(steps) > 1 and isinstance(steps[1], int) else 1
    return ".".join(str(step) for step in steps[:length])


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_same(value: Any, other: Any) -> bool:
    """Equality by which neither true is 1 nor false is 0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
