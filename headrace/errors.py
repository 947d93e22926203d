"""Every error that Headrace raises on purpose, and its gRPC status.

    HeadraceError
    ├── ConfigError            a process cannot start: a missing or malformed setting
    ├── InvalidRequest         the caller must change the request       INVALID_ARGUMENT     400
    │   └── ShapeMismatch      lengths or vocabularies disagree         INVALID_ARGUMENT     400
    ├── Unauthenticated        no or wrong key                          UNAUTHENTICATED      401
    ├── UnknownModel           no such model is served                  NOT_FOUND            404
    ├── UnknownSequence        open it again from its tokens            NOT_FOUND            404
    ├── StaleStep              that step is committed already           FAILED_PRECONDITION  409
    ├── OwnershipLost          another gateway owns the request         ABORTED              409
    ├── KVExhausted            no KV blocks now                         RESOURCE_EXHAUSTED   429
    ├── QueueFull              too many requests wait                   RESOURCE_EXHAUSTED   429
    ├── RequestCancelled       the caller went away                     CANCELLED            499
    ├── NonFiniteLogits        the model produced NaN or infinity       INTERNAL             500
    ├── CheckpointCorrupt      a file is not what its header says       DATA_LOSS            500
    ├── PeerUnavailable        another process does not answer          UNAVAILABLE          503
    └── DeadlineExceeded       the request's time is over               DEADLINE_EXCEEDED    504

The server interceptor turns these into a status and back (`headrace.rpc`); the gateway turns them
into the OpenAI error body. Any other exception is a bug.
"""

from typing import ClassVar

import grpc


class HeadraceError(Exception):
    """Base of all; its message is meant for the caller and names no address, path or stack."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(HeadraceError):
    """A process cannot start; the message names the setting and what to do."""


class InvalidRequest(HeadraceError):
    """The request can never succeed as it is.

    Attributes:
        param: The field at fault, where one is.
    """

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ShapeMismatch(InvalidRequest):
    """Lengths or vocabularies disagree."""


class Unauthenticated(HeadraceError):
    """No key, or a wrong one."""

    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class UnknownModel(HeadraceError):
    """No model of that name is served."""

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class UnknownSequence(HeadraceError):
    """The process has no such sequence, or at another length: open it again from its tokens."""

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class StaleStep(HeadraceError):
    """The step is committed already."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class OwnershipLost(HeadraceError):
    """The owner lease of a request is gone or another gateway's."""

    status = grpc.StatusCode.ABORTED
    http_status = 409


class KVExhausted(HeadraceError):
    """No KV blocks are free now; they will be when another sequence ends."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class QueueFull(HeadraceError):
    """Too many requests wait already."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class RequestCancelled(HeadraceError):
    """The caller went away or cancelled."""

    status = grpc.StatusCode.CANCELLED
    http_status = 499


class NonFiniteLogits(HeadraceError):
    """The model's output for one sequence holds NaN or infinity."""


class CheckpointCorrupt(HeadraceError):
    """A checkpoint's files do not match their headers or index."""

    status = grpc.StatusCode.DATA_LOSS


class PeerUnavailable(HeadraceError):
    """A process that is needed does not answer."""

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineExceeded(HeadraceError):
    """The request's time is over."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


ERRORS_BY_NAME: dict[str, type[HeadraceError]] = {
    error.__name__: error
    for error in (
        InvalidRequest,
        ShapeMismatch,
        Unauthenticated,
        UnknownModel,
        UnknownSequence,
        StaleStep,
        OwnershipLost,
        KVExhausted,
        QueueFull,
        RequestCancelled,
        NonFiniteLogits,
        CheckpointCorrupt,
        PeerUnavailable,
        DeadlineExceeded,
    )
}
"""The errors that cross the wire, by the name they carry in the trailing metadata."""
