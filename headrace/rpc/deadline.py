"""The deadline of the current task: set where a call comes in, honoured where calls go out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("deadline", default=None)


@contextmanager
def deadline_after(timeout_s: float | None) -> Iterator[None]:
    """Bound everything inside to timeout_s from now; None leaves it unbounded."""
    token = _deadline.set(None if timeout_s is None else time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining_s() -> float | None:
    """Seconds left to the current task; None when it has no deadline, negative when it is over."""
    deadline = _deadline.get()
    return None if deadline is None else deadline - time.monotonic()
