"""gRPC ignores an option whose name it does not know: a misspelt one silently does nothing."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from headrace.rpc.client import CHANNEL_OPTIONS
from headrace.rpc.server import SERVER_OPTIONS, message_limit

NAMES = sorted({name for name, _ in (*SERVER_OPTIONS, *CHANNEL_OPTIONS, message_limit(0))})


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_grpc_knows_every_option_that_is_set(name: str, library: bytes) -> None:
    assert name.encode() + b"\0" in library


def test_a_server_tolerates_pings_more_often_than_a_client_sends_them() -> None:
    server, client = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    tolerated = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert tolerated < int(client["grpc.keepalive_time_ms"])
