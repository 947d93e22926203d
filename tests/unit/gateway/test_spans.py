import json
from collections import Counter

from opentelemetry.sdk.trace import ReadableSpan

from headrace import telemetry
from tests.support.eventually import assert_eventually
from tests.support.gateway_rig import MODEL, GatewayRig
from tests.support.recorded_spans import recorded_spans

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def _spans(rig: GatewayRig, **body: object) -> list[ReadableSpan]:
    with recorded_spans() as exporter:
        request = {"prompt": "secret a", "max_tokens": 7, "gamma": 2, **body}
        headers = {"traceparent": TRACEPARENT}
        await rig.http.post("/v1/completions", json=request, headers=headers)
        await assert_eventually(
            lambda: any(s.name == telemetry.SPAN_REQUEST for s in exporter.get_finished_spans())
        )
        return list(exporter.get_finished_spans())


async def test_every_step_has_a_span_and_a_commit_under_the_request(rig: GatewayRig) -> None:
    spans = await _spans(rig)
    assert Counter(span.name for span in spans) == {"request": 1, "step": 3, "store.commit": 3}
    by_name = {span.name: span for span in spans}
    steps = [span for span in spans if span.name == "step"]
    request_id = by_name["request"].context.span_id
    assert all(step.parent is not None and step.parent.span_id == request_id for step in steps)
    step_ids = {step.context.span_id for step in steps}
    commits = [span for span in spans if span.name == "store.commit"]
    assert {commit.parent.span_id for commit in commits if commit.parent} == step_ids
    assert [(step.attributes or {})[telemetry.STEP_INDEX] for step in steps] == [0, 1, 2]
    assert [(step.attributes or {})[telemetry.NUM_ACCEPTED] for step in steps] == [2, 2, 0]


async def test_a_request_joins_its_callers_trace_and_follows_the_conventions(
    rig: GatewayRig,
) -> None:
    spans = await _spans(rig)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACEPARENT.split("-")[1]}
    request = next(span for span in spans if span.name == "request")
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.usage.input_tokens"] == 8
    assert attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_spans_hold_neither_prompt_nor_output(rig: GatewayRig) -> None:
    written = json.dumps([json.loads(span.to_json()) for span in await _spans(rig)])
    assert "secret" not in written
    assert "bcdefgh" not in written
