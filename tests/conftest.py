"""What tests of every kind share."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.redis_server import redis_server

torch.set_num_threads(1)  # tiny models: more threads would only wait for each other


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis that lives as long as the session."""
    with redis_server() as server:
        yield server.url
