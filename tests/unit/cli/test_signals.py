"""A signal cancels the work; a second one cancels its clean-up."""

import asyncio
import os
import signal

import pytest

from headrace.cli.signals import Interrupted, until_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_lets_the_work_clean_up(number: signal.Signals) -> None:
    events: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    with pytest.raises(Interrupted) as caught:
        await until_signal(work())
    assert caught.value.number is number
    assert events == ["cleaned up"]


async def test_a_second_signal_cuts_the_clean_up_short() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()

    with pytest.raises(Interrupted):
        await until_signal(work())


async def test_without_a_signal_the_result_comes_out() -> None:
    async def work() -> str:
        return "answer"

    assert await until_signal(work()) == "answer"


async def test_an_error_of_the_work_comes_out() -> None:
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await until_signal(work())
