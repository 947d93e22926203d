"""Channels and calls as every process makes them: keepalive, retries, deadlines, traces, errors."""

import json
from typing import TypeVar

import grpc
from grpc import aio

from headrace import errors, telemetry
from headrace.rpc.deadline import remaining_s
from headrace.rpc.server import (
    ERROR_NAME_KEY,
    ERROR_PARAM_KEY,
    KEEPALIVE_OPTIONS,
    MAX_MESSAGE_BYTES,
    message_limit,
)

Request = TypeVar("Request")
Response = TypeVar("Response")

# gRPC itself never retries once a response has begun.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_MARGIN_S = 0.05
"""Kept back from a deadline at each hop, so that the caller hears why before its own is over."""

_BY_STATUS: dict[grpc.StatusCode, type[errors.HeadraceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.UnknownSequence,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.QueueFull,
    grpc.StatusCode.CANCELLED: errors.PeerUnavailable,
    grpc.StatusCode.UNAVAILABLE: errors.PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.DATA_LOSS: errors.CheckpointCorrupt,
}


def open_channel(address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> aio.Channel:
    """A channel to "host:port" or "unix:/path" with keepalive and retries.

    Args:
        address: Of the server.
        max_message_bytes: Largest reply.
    """
    options = (*CHANNEL_OPTIONS, message_limit(max_message_bytes))
    return aio.insecure_channel(address, options=options)


async def invoke(
    method: aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    *,
    peer: str,
    timeout_s: float,
) -> Response:
    """Make one unary call within the current deadline.

    Args:
        method: A stub's method.
        request: Its message.
        peer: The process called, for error messages.
        timeout_s: Bound of this call; the current task's deadline bounds it too.

    Raises:
        HeadraceError: What the peer raised, PeerUnavailable or DeadlineExceeded.
    """
    remaining = remaining_s()
    if remaining is not None:
        timeout_s = min(timeout_s, remaining - _MARGIN_S)
    if timeout_s <= 0:
        raise errors.DeadlineExceeded(f"no time left to call the {peer}")
    call = method(request, timeout=timeout_s, metadata=tuple(telemetry.inject().items()))
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_from_status(error, peer=peer) from None
    finally:
        call.cancel()  # grpc.aio never cancels an abandoned call by itself


def error_from_status(error: aio.AioRpcError, *, peer: str) -> errors.HeadraceError:
    """The Headrace error that a failed call stands for."""
    trailing = dict(error.trailing_metadata() or ())
    kind = errors.ERRORS_BY_NAME.get(str(trailing.get(ERROR_NAME_KEY)))
    if kind is not None:
        message = error.details() or kind.__name__
        param = trailing.get(ERROR_PARAM_KEY)
        if issubclass(kind, errors.InvalidRequest):
            return kind(message, param=None if param is None else str(param))
        return kind(message)
    fallback = _BY_STATUS.get(error.code(), errors.HeadraceError)
    if fallback is errors.PeerUnavailable:
        return fallback(f"the {peer} does not answer")
    if fallback is errors.DeadlineExceeded:
        return fallback(f"the {peer} did not answer in time")
    return fallback(f"the {peer} failed: {error.code().name}")
