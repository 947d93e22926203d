"""Spans that this process finished, for tests of tracing."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace import telemetry


@contextmanager
def recorded_spans() -> Iterator[InMemorySpanExporter]:
    """Record while inside; the process's provider stays, as OpenTelemetry allows only one."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = telemetry.set_up("test", is_exporting=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    try:
        yield exporter
    finally:
        exporter.shutdown()
