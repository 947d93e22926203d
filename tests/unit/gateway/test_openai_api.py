"""The official client, unmodified, against a real server."""

import json
import string
from typing import Any

import openai
import pytest

from headrace.errors import NonFiniteLogits
from tests.support.eventually import assert_eventually
from tests.support.gateway_rig import MODEL, GatewayRig

ALPHABET = string.ascii_lowercase


async def test_chat_answers_as_the_client_expects(rig: GatewayRig) -> None:
    answer = await rig.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=7,
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.content == "abcdefg"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    # <|user|> h i <|end|> <|assistant|>
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == 12


async def test_a_completion_continues_the_text(rig: GatewayRig) -> None:
    answer = await rig.openai.completions.create(model=MODEL, prompt="xyzabc", max_tokens=3)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "def"


@pytest.mark.parametrize("prompt", ["c", ["c"], [66]])
async def test_a_prompt_is_a_text_a_list_of_one_or_token_ids(
    rig: GatewayRig, prompt: str | list[str] | list[int]
) -> None:
    answer = await rig.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    assert answer.choices[0].text == "de"


async def test_completions_default_to_sixteen_tokens(rig: GatewayRig) -> None:
    assert await rig.text("z") == ALPHABET[:16]


async def test_chat_defaults_to_the_whole_context(rig: GatewayRig) -> None:
    answer = await rig.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


async def test_a_chat_stream_has_one_id_one_role_and_one_end(rig: GatewayRig) -> None:
    stream = await rig.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *body, last = chunks
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in body] == ["assistant"] + [None] * (
        len(body) - 1
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == "abcdefghi"
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 9)


async def test_stream_and_plain_agree_on_text_usage_and_metrics(rig: GatewayRig) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 11, "stop": "k", "n": 2, "seed": 3}
    plain = await rig.complete(**body)
    response = await rig.http.post(
        "/v1/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    )
    lines = [line for line in response.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in plain["choices"]] == ["bcdefghij"] * 2
    assert chunks[-1]["usage"] == plain["usage"]
    assert chunks[-1]["metrics"]["speculative_decoding"] == plain["metrics"]["speculative_decoding"]


async def test_a_stream_is_never_cached_nor_buffered(rig: GatewayRig) -> None:
    response = await rig.http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": True}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "\r" not in response.text


async def test_three_choices_come_with_one_prompt_in_the_usage(rig: GatewayRig) -> None:
    answer = await rig.openai.completions.create(model=MODEL, prompt="abc", max_tokens=5, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["defgh"] * 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 15)


async def test_metrics_tell_what_speculation_did(rig: GatewayRig) -> None:
    rig.draft.num_right = 2
    metrics = (await rig.complete("a", max_tokens=9, gamma=4))["metrics"]
    # Steps of two accepted and one recovered token: 3 + 3, then gamma is 2 of which 2 pass: + 3.
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 6 / 10,
        "acceptance_histogram": [0, 0, 3, 0, 0],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 10,
    }
    assert metrics["headrace"]["sweeps"] == 3
    assert metrics["headrace"]["bytes_streamed"] == 3_000_000
    assert metrics["headrace"]["stream_gb_per_s"] == pytest.approx(1.0)
    assert metrics["headrace"]["acceptance_rate"] == pytest.approx(6 / 8)
    assert metrics["headrace"]["block_efficiency"] == pytest.approx(3.0)
    assert metrics["headrace"]["tokens_per_s"] > 0
    assert metrics["headrace"]["ttft_s"] > 0


@pytest.mark.parametrize("gamma", [0, 1, 4, "auto", None])
async def test_gamma_never_changes_the_text(rig: GatewayRig, gamma: int | str | None) -> None:
    assert await rig.text("a", max_tokens=20, gamma=gamma) == "bcdefghijklmnopqrstu"
    assert (not rig.draft.gammas) == (gamma == 0)


@pytest.mark.parametrize("max_tokens", range(1, 7))
async def test_max_tokens_are_exact_around_gamma(rig: GatewayRig, max_tokens: int) -> None:
    answer = await rig.complete("a", max_tokens=max_tokens, gamma=4)
    assert answer["choices"][0]["text"] == "bcdefgh"[:max_tokens]
    assert answer["usage"]["completion_tokens"] == max_tokens


@pytest.mark.parametrize("stop", ["b", "c", "cd", "fg", "efgh", "jk"])
async def test_a_stop_string_is_found_wherever_blocks_end(rig: GatewayRig, stop: str) -> None:
    answer = await rig.complete("a", max_tokens=20, gamma=4, stop=["@@", stop])
    assert answer["choices"][0]["text"] == ALPHABET[1 : ALPHABET.index(stop[0])]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == ALPHABET.index(stop[-1])


async def test_eos_in_mid_block_ends_the_text_and_counts(rig: GatewayRig) -> None:
    rig.target.ends_after_z = rig.draft.ends_after_z = True
    answer = await rig.complete("x", max_tokens=20, gamma=8)
    assert answer["choices"][0]["text"] == "yz"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


async def test_ignored_eos_goes_on(rig: GatewayRig) -> None:
    rig.target.ends_after_z = rig.draft.ends_after_z = True
    answer = await rig.complete("x", max_tokens=6, ignore_eos=True)
    assert answer["choices"][0]["text"] == "yzabc"
    assert answer["usage"]["completion_tokens"] == 6


async def test_a_negative_seed_is_taken_as_its_unsigned_twin(rig: GatewayRig) -> None:
    rig.target.gate.clear()
    seeds = []
    for seed in (-1, 2**64 - 1):
        async with rig.http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "seed": seed, "stream": True}
        ):
            await assert_eventually(lambda: len(rig.target.opened) == 1)
            seeds += [sequence.seed for sequence in rig.target.opened.values()]
        await assert_eventually(lambda: not rig.target.opened)
    assert seeds[0] == seeds[1]


async def test_the_models_are_listed(rig: GatewayRig) -> None:
    models = [model async for model in rig.openai.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await rig.openai.models.retrieve(MODEL)).owned_by == "headrace"


async def test_errors_are_the_clients_own_kinds(rig: GatewayRig) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await rig.openai.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await rig.openai.completions.create(model=MODEL, prompt="a", temperature=9)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"


async def test_closing_a_stream_closes_the_sequences(rig: GatewayRig) -> None:
    stream = await rig.openai.completions.create(
        model=MODEL, prompt="a", max_tokens=200, stream=True, extra_body={"gamma": 0}
    )
    async for _ in stream:
        rig.target.gate.clear()
        break
    await stream.close()
    await assert_eventually(lambda: not rig.target.opened and not rig.draft.opened)
    await assert_eventually(lambda: rig.target.num_at_gate == 0)


async def test_an_error_in_mid_stream_is_data_and_ends_it(
    rig: GatewayRig,
) -> None:
    rig.target.errors.append(NonFiniteLogits("layer 3 gave NaN"))
    response = await rig.http.post("/v1/completions", json={"prompt": "a", "stream": True})
    lines = [line for line in response.text.split("\n") if line]
    assert len(lines) == 1
    error = json.loads(lines[0].removeprefix("data: "))["error"]
    assert error["message"] == "layer 3 gave NaN"
    rig.target.errors.append(NonFiniteLogits("layer 3 gave NaN"))
    stream = await rig.openai.completions.create(model=MODEL, prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="NaN"):
        await anext(aiter(stream))


async def test_one_failing_request_leaves_the_others_alone(rig: GatewayRig) -> None:
    rig.target.errors.append(NonFiniteLogits("layer 3 gave NaN"))
    failed = await rig.http.post("/v1/completions", json={"prompt": "a", "n": 3})
    assert failed.status_code == 500
    assert await rig.text("a", max_tokens=2) == "bc"
    await assert_eventually(lambda: not rig.target.opened)
