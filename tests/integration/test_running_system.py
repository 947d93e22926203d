"""The whole system as it is deployed: real processes, Redis, OTLP, the official client."""

import asyncio
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from headrace import telemetry
from headrace.rpc import gateway_pb2, gateway_pb2_grpc
from tests.support.decoding import plain_greedy
from tests.support.eventually import assert_eventually
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.running_stack import RunningStack, running_stack
from tests.support.tiny_models import make_noisy_copy, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A running stack of a tiny model, and where its spans go."""

    stack: RunningStack
    spans: OtlpReceiver
    target: Path


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    target = make_tiny_model(directory / "target", "llama")
    draft = make_noisy_copy(target, directory / "draft", noise=0.1)
    with otlp_receiver() as spans:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": spans.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        log = directory / "serve.log"
        with running_stack(target, draft, log, environment=environment) as stack:
            yield System(stack=stack, spans=spans, target=target)


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    url = f"{system.stack.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{system.stack.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


PARENTS = {
    telemetry.SPAN_STEP: telemetry.SPAN_REQUEST,
    telemetry.SPAN_PROPOSE: telemetry.SPAN_STEP,
    telemetry.SPAN_VERIFY: telemetry.SPAN_STEP,
    telemetry.SPAN_SWEEP: telemetry.SPAN_VERIFY,
    telemetry.SPAN_ACCEPT: telemetry.SPAN_VERIFY,
    telemetry.SPAN_STREAM: telemetry.SPAN_SWEEP,
    telemetry.SPAN_COMMIT: telemetry.SPAN_STEP,
}
"""Which span is whose child."""

SERVICES = {
    telemetry.SPAN_REQUEST: "headrace-gateway",
    telemetry.SPAN_STEP: "headrace-gateway",
    telemetry.SPAN_COMMIT: "headrace-gateway",
    telemetry.SPAN_PROPOSE: "headrace-draft",
    telemetry.SPAN_VERIFY: "headrace-target",
    telemetry.SPAN_SWEEP: "headrace-target",
    telemetry.SPAN_ACCEPT: "headrace-target",
    telemetry.SPAN_STREAM: "headrace-streamer",
}
"""Which process each span comes from."""


async def test_one_trace_holds_every_step_of_a_request_over_all_four_processes(
    system: System,
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with httpx.AsyncClient(base_url=system.stack.base_url, timeout=60) as client:
        response = await client.post(
            "/v1/completions",
            json={"prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True},
            headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
        )
    num_steps = response.json()["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert num_steps > 2

    def spans_are_complete() -> None:
        counts = Counter(span.name for span in system.spans.spans(trace_id))
        assert counts[telemetry.SPAN_REQUEST] == 1
        # The last step may want one token only, which is plain.
        assert num_steps <= counts[telemetry.SPAN_STEP] <= num_steps + 1
        for name in PARENTS:
            if name != telemetry.SPAN_PROPOSE:
                assert counts[name] == counts[telemetry.SPAN_STEP], name
        assert counts[telemetry.SPAN_PROPOSE] == num_steps

    await assert_eventually(spans_are_complete, timeout_s=20)
    spans = system.spans.spans(trace_id)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.service == SERVICES[span.name]
        if span.name in PARENTS:
            assert by_id[span.parent_span_id].name == PARENTS[span.name]
    steps = [span for span in spans if span.name == telemetry.SPAN_STEP]
    assert sorted(step.attributes[telemetry.STEP_INDEX] for step in steps) == list(
        range(len(steps))
    )
    for step in steps:
        _check_step(step)


def _check_step(step: ReceivedSpan) -> None:
    assert 0 <= step.attributes[telemetry.NUM_ACCEPTED] <= step.attributes[telemetry.GAMMA] <= 4
    assert step.attributes[telemetry.BYTES_STREAMED] > 0
    assert step.attributes[telemetry.NUM_TOKENS] >= 1
    assert step.attributes[telemetry.FORWARD_NS] > 0
    assert step.attributes[telemetry.STALL_NS] >= 0


async def generate(
    stub: gateway_pb2_grpc.InferenceStub, prompt: list[int], **settings: Any
) -> list[int]:
    """The tokens of one request over gRPC, end-of-sequence tokens ignored."""
    request = gateway_pb2.GenerateRequest(
        tokens=gateway_pb2.TokenInput(token_ids=prompt), ignore_eos=True, **settings
    )
    responses = stub.Generate(request, timeout=120)
    return [token async for response in responses for token in response.token_ids]


async def test_greedy_text_is_plain_generates(system: System) -> None:
    prompt = [5, 17, 99, 3]
    expected = plain_greedy(system.target, [prompt], [32])[0]
    async with grpc.aio.insecure_channel(system.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        assert await generate(stub, prompt, max_tokens=32, temperature=0.0, gamma=8) == expected


async def sampled_tokens(system: System, seeds: range, prompt: list[int]) -> NDArray[np.int64]:
    """[len(seeds), 3] the first tokens that the running system samples."""
    places = asyncio.Semaphore(16)
    async with grpc.aio.insecure_channel(system.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)

        async def one(seed: int) -> list[int]:
            async with places:
                return await generate(
                    stub, prompt, max_tokens=3, temperature=0.7, top_k=8, seed=seed, gamma=2
                )

        return np.array(await asyncio.gather(*map(one, seeds)))


def plain_samples(target: Path, count: int, prompt: list[int]) -> NDArray[np.int64]:
    """[count, 3] what plain Hugging Face sampling gives for the same settings."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    torch.manual_seed(0)
    ids = torch.tensor([prompt] * count)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=0.7,
            top_k=8,
            top_p=1.0,
            max_new_tokens=3,
            min_new_tokens=3,
        )
    tokens: NDArray[np.int64] = output[:, len(prompt) :].numpy()
    return tokens


async def test_sampled_output_follows_plain_sampling(system: System) -> None:
    prompt = [5, 17, 99, 3]
    ours = await sampled_tokens(system, range(1_000, 2_600), prompt)
    theirs = plain_samples(system.target, 20_000, prompt)
    for position in range(3):
        assert _two_sample_excess(ours[:, position], theirs[:, position]) < 0
    assert (
        _two_sample_excess(ours[:, 0] * 1_000 + ours[:, 1], theirs[:, 0] * 1_000 + theirs[:, 1]) < 0
    )


def _two_sample_excess(ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> float:
    """Two-sample chi-square statistic minus its bound df + 10 sqrt(2 df); rare bins are merged."""
    values, index = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    counts = np.stack(
        [
            np.bincount(index[: ours.size], minlength=values.size),
            np.bincount(index[ours.size :], minlength=values.size),
        ]
    )
    share = ours.size / (ours.size + theirs.size)
    is_common = counts.sum(axis=0) * share >= 5
    merged = np.column_stack([counts[:, is_common], counts[:, ~is_common].sum(axis=1)])
    merged = merged[:, merged.sum(axis=0) > 0]
    expected = np.outer([share, 1 - share], merged.sum(axis=0))
    degrees = int(merged.shape[1]) - 1
    statistic = float(((merged - expected) ** 2 / expected).sum())
    return statistic - degrees - 10 * math.sqrt(2 * degrees)


def test_the_official_client_works_unmodified(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["~~"],
    }
    plain = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == plain.usage
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="a", max_tokens=10**6)


async def test_a_client_that_leaves_frees_its_sequences(
    system: System, async_client: openai.AsyncOpenAI
) -> None:
    model = (await async_client.models.list()).data[0].id
    stream = await async_client.completions.create(
        model=model, prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()

    def nothing_runs() -> bool:
        metrics = httpx.get(f"{system.stack.base_url}/metrics").text
        running = [line for line in metrics.splitlines() if "num_requests_running{" in line]
        return len(running) == 1 and float(running[0].split()[-1]) == 0

    await assert_eventually(nothing_runs, timeout_s=10)


async def test_the_same_seed_gives_the_same_text_alone_and_in_a_crowd(
    async_client: openai.AsyncOpenAI,
) -> None:
    model = (await async_client.models.list()).data[0].id

    async def text(seed: int) -> str:
        answer = await async_client.completions.create(
            model=model,
            prompt="once",
            max_tokens=24,
            temperature=1.0,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return answer.choices[0].text

    alone = await text(11)
    crowd = await asyncio.gather(*(text(seed) for seed in (11, 12, 13, 14, 11)))
    assert crowd[0] == crowd[4] == alone
    assert len(set(crowd)) == 4


def test_headrace_run_prints_one_object_and_leaves_nothing(system: System, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("headrace-*"))
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("headrace")),
            *("run", "hello", "--json", "--max-tokens", "12", "--gamma", "3"),
            *("--target", str(system.target), "--draft", str(system.target)),
            *("--weights", "streamed"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answer = json.loads(result.stdout)
    assert answer["usage"]["completion_tokens"] <= 12
    speculative = answer["metrics"]["speculative_decoding"]
    assert speculative["num_accepted_draft_tokens"] == speculative["num_draft_tokens"] > 0
    assert answer["metrics"]["headrace"]["bytes_streamed"] > 0
    assert set(Path("/dev/shm").glob("headrace-*")) <= before
    assert not list(tmp_path.glob("headrace-*"))
    assert not [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("TMPDIR") == str(tmp_path)
    ]


@pytest.mark.parametrize("victim", ["streamer", "target"])
async def test_a_process_that_is_killed_ends_the_stack_and_every_stream_with_a_reason(
    victim: str, system: System, tmp_path: Path
) -> None:
    log = tmp_path / "serve.log"
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with running_stack(system.target, None, log) as stack:
        children = psutil.Process(stack.pid).children(recursive=True)
        process = next(child for child in children if f"services.{victim}" in child.cmdline())
        async with (
            httpx.AsyncClient(base_url=stack.base_url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.kill()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert "error" in json.loads(rest[-1].removeprefix("data: "))
        await assert_eventually(lambda: _is_gone(stack.pid), timeout_s=20)
    assert f"the {victim} ended by SIGKILL" in log.read_text()


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
