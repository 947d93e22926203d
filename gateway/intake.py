"""From a request of either protocol to one that can run: every rule on values lives here."""

import secrets
from typing import Final

from gateway.spec import ChatMessage, GenerationSpec, InferenceRequest
from gateway.tokenizer import Tokenizer
from headrace.errors import InvalidRequest, UnknownModel
from headrace.types import MAX_SEED, SamplingParams

ROLES: Final = ("system", "user", "assistant")
MAX_CHOICES: Final = 16
MAX_GAMMA: Final = 64
MAX_STOPS: Final = 4
MAX_MESSAGES: Final = 4_096
_MAX_STOP_CHARS = 1_024
_MAX_TEMPERATURE = 2.0
_MIN_SEED = -(2**63)
_MAX_CHARS_PER_TOKEN = 64
"""No real text has more; a longer prompt is refused before it costs a tokenizer minutes."""


class Intake:
    """Checks requests against one model."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        max_length: int,
        default_max_tokens: int,
        default_gamma: int,
    ) -> None:
        """Set the limits.

        Args:
            model_name: The only model.
            tokenizer: Its tokenizer.
            max_length: Tokens of prompt and output together, at most.
            default_max_tokens: Output tokens of a request that names no limit; KV is reserved for
                all of them.
            default_gamma: Draft tokens per step where the request leaves it to the gateway.
        """
        self.model_name = model_name
        self.max_length = max_length
        self._tokenizer = tokenizer
        self._default_max_tokens = default_max_tokens
        self._default_gamma = default_gamma

    async def spec(self, request: InferenceRequest) -> GenerationSpec:
        """Check and tokenize.

        Raises:
            UnknownModel: Another model is asked for.
            InvalidRequest: Names the field and what to do.
        """
        self.check_model(request.model)
        sampling = _sampling(request)
        _check_range(request.num_choices, 1, MAX_CHOICES, param="n")
        if request.gamma is not None:
            _check_range(request.gamma, 0, MAX_GAMMA, param="gamma")
        _check_stops(request.stop)
        if request.max_tokens is not None and request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be 1 or more", param="max_tokens")
        token_ids = await self._encode(request)
        return GenerationSpec(
            operation=request.operation,
            prompt_token_ids=tuple(token_ids),
            max_tokens=self._max_tokens(len(token_ids), request.max_tokens),
            sampling=sampling,
            stop=request.stop,
            num_choices=request.num_choices,
            gamma=self._default_gamma if request.gamma is None else request.gamma,
            ignore_eos=request.ignore_eos,
        )

    def check_model(self, name: str | None) -> None:
        """Refuse a name other than the served model's; none means the only one."""
        if name is not None and name != self.model_name:
            raise UnknownModel(
                f"the model {name[:100]!r} is not served here: use {self.model_name!r}"
            )

    async def _encode(self, request: InferenceRequest) -> list[int]:
        prompt = request.prompt
        param = "messages" if request.operation == "chat" else "prompt"
        if not prompt:
            raise InvalidRequest(f"{param} is empty: give the model something", param=param)
        if isinstance(prompt, str):
            self._check_chars(len(prompt), param)
            token_ids = await self._tokenizer.encode_text(prompt)
        elif isinstance(prompt[0], int):
            token_ids = list(prompt)
            self._check_token_ids(token_ids)
        else:
            messages = list(prompt)
            _check_range(len(messages), 1, MAX_MESSAGES, param="messages", what="their number")
            _check_roles(messages)
            self._check_chars(sum(len(message.content) for message in messages), param)
            token_ids = await self._tokenizer.encode_chat(messages)
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens: give the model something", param=param)
        if len(token_ids) >= self.max_length:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens and leaves no room in the context of "
                f"{self.max_length}: shorten it",
                param=param,
            )
        return token_ids

    def _check_chars(self, num_chars: int, param: str) -> None:
        if num_chars > _MAX_CHARS_PER_TOKEN * self.max_length:
            raise InvalidRequest(
                f"the prompt has {num_chars} characters, far beyond the context of "
                f"{self.max_length} tokens: shorten it",
                param=param,
            )

    def _check_token_ids(self, token_ids: list[int]) -> None:
        num_tokens = self._tokenizer.num_tokens
        if not 0 <= min(token_ids) <= max(token_ids) < num_tokens:
            raise InvalidRequest(
                f"prompt: token ids must be between 0 and {num_tokens - 1}", param="prompt"
            )

    def _max_tokens(self, prompt_length: int, wanted: int | None) -> int:
        room = self.max_length - prompt_length
        if wanted is not None and wanted > room:
            raise InvalidRequest(
                f"max_tokens is {wanted}, but after a prompt of {prompt_length} tokens the context "
                f"of {self.max_length} has room for {room}: ask for at most {room}",
                param="max_tokens",
            )
        return min(room, self._default_max_tokens) if wanted is None else wanted


def _sampling(request: InferenceRequest) -> SamplingParams:
    if not 0.0 <= request.temperature <= _MAX_TEMPERATURE:  # also refuses NaN
        raise InvalidRequest("temperature must be between 0 and 2", param="temperature")
    seed = secrets.randbits(64) if request.seed is None else request.seed
    if not _MIN_SEED <= seed <= MAX_SEED:
        raise InvalidRequest("seed must be a 64-bit integer", param="seed")
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=0 if request.top_k == -1 else min(request.top_k, 2**31),
        seed=seed % (MAX_SEED + 1),
    )


def _check_range(value: int, low: int, high: int, *, param: str, what: str = "") -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{param}: {what or 'the value'} must be between {low} and {high}", param=param
        )


def _check_roles(messages: list[ChatMessage]) -> None:
    for message in messages:
        if message.role not in ROLES:
            raise InvalidRequest(
                f"the role {message.role[:50]!r} is unknown: use one of {', '.join(ROLES)}",
                param="messages",
            )


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings", param="stop")
    if any(not 1 <= len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(
            f"each stop string must have 1 to {_MAX_STOP_CHARS} characters", param="stop"
        )
