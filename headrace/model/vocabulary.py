"""The identity of a model directory's tokenizer."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What two models must share to speculate together."""

    fingerprint: str
    """Hash of every token and its id."""
    num_tokens: int
    """Ids that stand for a token lie below it; a model may have more output rows."""


def load_vocabulary(directory: Path) -> Vocabulary:
    """Read the tokenizer of a model directory.

    Raises:
        ConfigError: There is none, or it needs code of its own.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: no usable tokenizer ({error})") from None
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
    return Vocabulary(fingerprint=digest, num_tokens=max(index for _, index in tokens) + 1)
