"""Waiting for a fact without guessing how long it takes."""

import asyncio
import time
from collections.abc import Callable


async def assert_eventually(check: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    """Call check until it neither raises AssertionError nor returns False; its last word counts."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if check() is not False:
                return
            failure = AssertionError("the check stayed false")
        except AssertionError as error:
            failure = error
        if time.monotonic() > deadline:
            raise failure
        await asyncio.sleep(0.01)
