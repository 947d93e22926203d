"""What tests of every kind share."""

from collections.abc import Iterator

import pytest

from tests.support.redis_server import redis_server


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis that lives as long as the session."""
    with redis_server() as server:
        yield server.url
