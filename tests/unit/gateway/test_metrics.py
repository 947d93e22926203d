from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway_rig import MODEL, GatewayRig


async def _scrape(rig: GatewayRig) -> dict[tuple[str, ...], float]:
    text = (await rig.http.get("/metrics")).text
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL
            values[sample.name, *sample.labels.values()] = sample.value
    return values


async def test_counters_reconcile_with_usage_and_the_answers_metrics(rig: GatewayRig) -> None:
    rig.draft.num_right = 2
    answer = await rig.complete("a", max_tokens=9, gamma=4, n=2)
    spec = answer["metrics"]["speculative_decoding"]
    values = await _scrape(rig)
    prefix = "headrace:spec_decode_num_"
    assert values[f"{prefix}drafts_total",] == spec["num_spec_steps"]
    assert values[f"{prefix}draft_tokens_total",] == spec["num_draft_tokens"]
    assert values[f"{prefix}accepted_tokens_total",] == spec["num_accepted_draft_tokens"]
    per_position = [
        values.get((f"{prefix}accepted_tokens_per_pos_total", str(i))) for i in range(3)
    ]
    assert per_position == [6, 6, None]
    assert values["headrace:prompt_tokens_total",] == answer["usage"]["prompt_tokens"]
    assert values["headrace:generation_tokens_total",] == answer["usage"]["completion_tokens"]
    assert values["headrace:request_success_total", "length"] == 2
    bytes_streamed = answer["metrics"]["headrace"]["bytes_streamed"]
    assert values["headrace:streamed_bytes_total",] == bytes_streamed
    assert values["headrace:time_to_first_token_seconds_count",] == 1
    assert values["headrace:e2e_request_latency_seconds_count",] == 1
    assert values["headrace:inter_token_latency_seconds_count",] == 4
    assert values["headrace:time_per_output_token_seconds_count",] == 2
    assert values["headrace:num_requests_running",] == 0
    assert values["headrace:num_requests_waiting",] == 0
    assert values["headrace:kv_cache_usage_perc",] == 0


async def test_refusals_are_counted_by_kind(rig: GatewayRig) -> None:
    await rig.complete("a", n=99)
    await rig.complete("a", model="other")
    values = await _scrape(rig)
    assert values["headrace:request_failure_total", "InvalidRequest"] == 1
    assert values["headrace:request_failure_total", "UnknownModel"] == 1
