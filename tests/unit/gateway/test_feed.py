import asyncio

import pytest

from gateway.events import Delta
from gateway.feed import Feed
from headrace.errors import PeerUnavailable
from tests.support.eventually import assert_eventually


def _delta(step_index: int) -> Delta:
    return Delta(index=0, step_index=step_index, text="", token_ids=(), finish_reason=None)


async def test_events_come_in_order_and_then_the_error() -> None:
    feed = Feed(max_events=4)
    await feed.put(_delta(0))
    await feed.put(_delta(1))
    feed.end(PeerUnavailable("gone"))
    reader = aiter(feed)
    assert [await anext(reader), await anext(reader)] == [_delta(0), _delta(1)]
    with pytest.raises(PeerUnavailable):
        await anext(reader)


async def test_a_full_feed_holds_its_writer_until_the_reader_takes_one() -> None:
    feed = Feed(max_events=1)
    await feed.put(_delta(0))
    writer = asyncio.create_task(feed.put(_delta(1)))
    await asyncio.wait([writer], timeout=0.01)
    assert not writer.done()
    reader = aiter(feed)
    assert await anext(reader) == _delta(0)
    await assert_eventually(writer.done)
    assert await anext(reader) == _delta(1)


async def test_ending_a_full_feed_does_not_wait() -> None:
    feed = Feed(max_events=1)
    await feed.put(_delta(0))
    feed.end()
    assert [event async for event in feed] == [_delta(0)]
