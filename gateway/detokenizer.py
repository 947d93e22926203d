"""Tokens to text, piece by piece. Knows no stop strings and no model."""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The text of a growing sequence of tokens.

    A character whose bytes span tokens comes out whole, and the pieces joined are what decoding all
    tokens at once gives. Decoding a window of tokens and dropping what was delivered keeps both
    true for byte-level tokenizers and for those that mark word beginnings.
    """

    def __init__(self, decode: Decode) -> None:
        """Begin.

        Args:
            decode: Text of some tokens, without special ones; an incomplete character at the end
                is the replacement character.
        """
        self._decode = decode
        self._window: list[int] = []
        """The last delivered tokens, as context, and those not delivered yet."""
        self._num_delivered = 0

    def push(self, token_id: int) -> str:
        """Take one token; the text that it completes, which may be empty."""
        self._window.append(token_id)
        text = self._new_text()
        if not text:  # a special token: were it kept, the window could grow for ever
            self._window.pop()
        return "" if text.endswith(_REPLACEMENT) else self._deliver(text)

    def flush(self) -> str:
        """The text of an incomplete character at the end."""
        return self._deliver(self._new_text())

    def _new_text(self) -> str:
        delivered = self._decode(self._window[: self._num_delivered])
        return self._decode(self._window)[len(delivered) :]

    def _deliver(self, text: str) -> str:
        if text:
            self._window = self._window[self._num_delivered :]
            self._num_delivered = len(self._window)
        return text
