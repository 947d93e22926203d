"""What a request asks for, twice: as it came in, and checked and in tokens. Knows no protocol."""

from dataclasses import dataclass
from typing import Literal

from headrace.types import SamplingParams

Operation = Literal["chat", "text_completion"]
"""As `gen_ai.operation.name` spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A request of either protocol, not checked yet."""

    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    """Text, token ids, or messages for the chat template."""
    operation: Operation
    model: str | None = None
    """None: the only one."""
    max_tokens: int | None = None
    """None: as many as the gateway gives by default."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """None: a random one."""
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    ignore_eos: bool = False
    gamma: int | None = None
    """None: chosen by the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A request that can be run as it is."""

    operation: Operation
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    """Output tokens of each choice at most; prompt and output fit the context."""
    sampling: SamplingParams
    """The seed is the request's; each choice derives its own."""
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    gamma: int
    """Draft tokens per step at most; 0 is plain decoding."""
    ignore_eos: bool = False
