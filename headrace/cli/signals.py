"""Ctrl-C and SIGTERM as the cancellation of one piece of work."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the work.

    Attributes:
        number: Which one.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


async def until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run work; a signal cancels it, and a second one cancels its clean-up.

    Raises:
        Interrupted: After work has cleaned up.
    """
    received: list[signal.Signals] = []
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def interrupt(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
