"""OpenTelemetry set-up and every span and attribute name; the only file that spells them.

Spans of one request, all under one trace id:

    request                              gateway    GenAI semantic conventions
    └── step                             gateway    one round of propose, verify, commit
        ├── draft.propose                draft
        ├── target.verify                target
        │   ├── target.sweep             target     one per sweep the step took part in
        │   │   └── streamer.sweep       streamer
        │   └── target.accept            target
        └── store.commit                 gateway
"""

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

SPAN_REQUEST = "request"
SPAN_STEP = "step"
SPAN_PROPOSE = "draft.propose"
SPAN_VERIFY = "target.verify"
SPAN_SWEEP = "target.sweep"
SPAN_ACCEPT = "target.accept"
SPAN_STREAM = "streamer.sweep"
SPAN_COMMIT = "store.commit"

SEQUENCE_ID = "headrace.sequence_id"
STEP_INDEX = "headrace.step_index"
GAMMA = "headrace.gamma"
NUM_ACCEPTED = "headrace.num_accepted"
NUM_SEQUENCES = "headrace.sweep.num_sequences"
NUM_TOKENS = "headrace.sweep.num_tokens"
SWEEP_INDEX = "headrace.sweep.index"
BYTES_STREAMED = "headrace.bytes_streamed"
QUEUE_NS = "headrace.queue_ns"
STALL_NS = "headrace.stall_ns"
FORWARD_NS = "headrace.forward_ns"
READ_NS = "headrace.read_ns"

# GenAI semantic conventions (status Development): open-telemetry/semantic-conventions-genai.
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"


def set_up(service_name: str, *, is_exporting: bool) -> TracerProvider:
    """Install the process's tracer provider.

    Args:
        service_name: "gateway", "draft", "target" or "streamer"; becomes `service.name`.
        is_exporting: Send spans over OTLP; the exporter reads the standard OTEL_* variables.

    Returns:
        The provider; call its `shutdown` before the process ends, so that nothing is lost.
    """
    resource = Resource.create({"service.name": f"headrace-{service_name}"})
    provider = TracerProvider(resource=resource)
    if is_exporting:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def tracer() -> trace.Tracer:
    """The process's tracer."""
    return trace.get_tracer("headrace")


def inject() -> dict[str, str]:
    """Headers that carry the current trace context (W3C)."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def extract(headers: dict[str, str]) -> Context:
    """The trace context that some headers carry; the empty context when they carry none."""
    return propagate.extract(headers, context=Context())


def traceparent(context: Context) -> str | None:
    """The context as one W3C traceparent value, or None when it holds no valid span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=context)
    return carrier.get("traceparent")
