"""The target's tokenizer, chat template and end-of-sequence tokens. Never runs a model's own code.

The work on prompts happens on one thread of its own: a long prompt does not hold up the loop, and
the tokenizer is never used by two threads at once.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer

from gateway.spec import ChatMessage
from headrace.errors import ConfigError, InvalidRequest


class Tokenizer:
    """Text and messages to tokens, and tokens to text."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """Wrap a loaded tokenizer; `load` is the way to get one.

        Args:
            tokenizer: A fast transformers tokenizer.
            eos_token_ids: Tokens that end a sequence.
        """
        self.eos_token_ids = eos_token_ids
        self.num_tokens = len(tokenizer)
        self._tokenizer = tokenizer
        # Decoding happens on the loop, so it has a copy of its own.
        self._decoder = RawTokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read the tokenizer of a model directory; blocks.

        Raises:
            ConfigError: There is none, or it cannot be used.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # noqa: BLE001 - any damage ends the start with the reason
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"HEADRACE_TARGET_DIR holds no usable tokenizer ({reason}): "
                "point it at a complete model directory"
            ) from None
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ConfigError("HEADRACE_TARGET_DIR has no tokenizer.json: convert its tokenizer")
        return cls(tokenizer, _read_eos_token_ids(directory, tokenizer.eos_token_id))

    async def encode_text(self, text: str) -> list[int]:
        """Tokens of raw text, with the special tokens that the tokenizer adds."""

        def encode() -> list[int]:
            return list(self._tokenizer(text)["input_ids"])

        return await self._run(encode)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a conversation, up to where the model's turn begins.

        Raises:
            InvalidRequest: There is no chat template, or it refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions", param="messages"
            )
        turns = [_turn(message) for message in messages]

        def encode() -> list[int]:
            return list(
                self._tokenizer.apply_chat_template(
                    turns, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            )

        try:
            return await self._run(encode)
        except TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens, without special ones."""
        return self._decoder.decode(list(token_ids), skip_special_tokens=True)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, encode: Any) -> list[int]:
        loop = asyncio.get_running_loop()
        token_ids: list[int] = await loop.run_in_executor(self._executor, encode)
        return token_ids


def _turn(message: ChatMessage) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


def _read_eos_token_ids(directory: Path, fallback: int | None) -> frozenset[int]:
    """What ends a sequence, by the rule of `generate`: generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset() if fallback is None else frozenset([fallback])
