"""Finds stop strings in text that arrives in pieces. Pure."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through until one of some strings is complete.

    What the end of the text so far may still turn into a stop string is held back, nothing more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            The text to deliver, and whether a stop string is complete; then the text ends just
            before it, and no more may be pushed. Of several, the one that is complete first counts.
        """
        text = self._held + text
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if matches:
            start, _ = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return text[:start], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """What is held back: the text is over, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
