"""A real OTLP receiver in this process: spans arrive over gRPC as at any collector."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """What a test asks of a span."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_span_id: str
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._lock = Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the RPC's name
        """Take one batch."""
        spans = [
            ReceivedSpan(
                service=_attributes(resource.resource.attributes).get("service.name", ""),
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_span_id=span.parent_span_id.hex(),
                attributes=_attributes(span.attributes),
                start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano,
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans.extend(spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[ReceivedSpan]:
        """Everything received so far, or what belongs to one trace."""
        with self._lock:
            return [s for s in self._spans if trace_id is None or s.trace_id == trace_id]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver that listens on loopback; its endpoint is an OTEL_EXPORTER_OTLP_ENDPOINT."""
    receiver = OtlpReceiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    register(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
