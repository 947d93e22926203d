"""Asks one server for its health: `python -m headrace.rpc.healthcheck VARIABLE`.

VARIABLE names the setting that holds the server's address. Exit code 0 means serving.
"""

import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.config import Environment
from headrace.errors import ConfigError

_TIMEOUT_S = 3.0


def main(variable: str) -> None:
    """Return when the server answers SERVING; else exit with the reason.

    Args:
        variable: The environment variable with "host:port" or "unix:/path".
    """
    try:
        address = Environment(os.environ).text(variable)
    except ConfigError as error:
        sys.exit(error.message)
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs know aio only
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.exit(f"no answer: {error.code().name}")
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit("not serving")


if __name__ == "__main__":
    main(sys.argv[1])
