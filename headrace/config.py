"""Typed access to the environment. A process reads its settings once, in its `__main__`.

A missing or malformed value raises ConfigError with the variable's name and what is expected.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.errors import ConfigError

T = TypeVar("T")


class Environment:
    """Settings by name, from a mapping such as os.environ. An empty value counts as missing."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def text(self, name: str, default: str | None = None) -> str:
        """The value as it is."""
        return self._get(name, str, "a text", default)

    def optional_text(self, name: str) -> str | None:
        """The value, or None when it is missing."""
        return self._values.get(name) or None

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of some words."""
        value = self._values.get(name) or default
        if value not in choices:
            raise ConfigError(f"{name}={value} is unknown: set it to one of {', '.join(choices)}")
        return value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 0) -> int:
        """A whole number of at least minimum."""
        value = self._get(name, int, "a whole number", default)
        if value < minimum:
            raise ConfigError(f"{name}={value} is too small: set it to {minimum} or more")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A finite number of at least minimum."""
        value = self._get(name, float, "a number", default)
        if not minimum <= value < float("inf"):
            raise ConfigError(f"{name}={value} is out of range: set it to {minimum} or more")
        return value

    def directory(self, name: str, default: Path | None = None) -> Path:
        """A directory that exists."""
        path = self._get(name, Path, "a directory", default)
        if not path.is_dir():
            raise ConfigError(f"{name}={path} is not a directory: point it at one that exists")
        return path

    def _get(self, name: str, cast: Callable[[str], T], kind: str, default: T | None) -> T:
        raw = self._values.get(name, "")
        if not raw:
            if default is None:
                raise ConfigError(f"{name} is not set: set it to {kind}")
            return default
        try:
            return cast(raw)
        except ValueError:
            raise ConfigError(f"{name}={raw!r} is malformed: set it to {kind}") from None
