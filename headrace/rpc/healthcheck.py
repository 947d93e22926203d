"""Asks one server for its health: `python -m headrace.rpc.healthcheck VARIABLE`.

VARIABLE names the setting that holds the server's address. Exit code 0 means serving.
"""

import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main() -> None:
    """Exit 0 when the server answers SERVING."""
    address = os.environ[sys.argv[1]].replace("0.0.0.0", "127.0.0.1")
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs know aio only
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.exit(f"no answer: {error.code().name}")
    sys.exit(response.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    main()
