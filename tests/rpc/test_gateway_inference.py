from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import InvalidRequest
from headrace.rpc import gateway_pb2, gateway_pb2_grpc
from headrace.rpc.client import error_from_status, open_channel
from tests.support.eventually import assert_eventually
from tests.support.gateway_rig import MODEL, GatewayRig, gateway_rig, save_toy_model

Responses = list[gateway_pb2.GenerateResponse]


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_model(tmp_path_factory.mktemp("toy-model"))


@pytest.fixture
async def rig(toy_model_dir: Path, redis_url: str) -> AsyncIterator[GatewayRig]:
    async with gateway_rig(toy_model_dir, redis_url) as rig:
        yield rig


@pytest.fixture
async def channel(rig: GatewayRig) -> AsyncIterator[aio.Channel]:
    async with open_channel(rig.gateway.rpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: aio.Channel) -> gateway_pb2_grpc.InferenceStub:
    return gateway_pb2_grpc.InferenceStub(channel)


async def _generate(
    stub: gateway_pb2_grpc.InferenceStub, request: gateway_pb2.GenerateRequest
) -> Responses:
    return [response async for response in stub.Generate(request, timeout=30)]


async def test_generate_streams_text_tokens_and_one_usage(
    stub: gateway_pb2_grpc.InferenceStub,
) -> None:
    request = gateway_pb2.GenerateRequest(prompt="abc", max_tokens=9, n=2)
    responses = await _generate(stub, request)
    for index in range(2):
        own = [response for response in responses if response.index == index]
        assert "".join(response.text for response in own) == "defghijkl"
        assert sum(len(response.token_ids) for response in own) == 9
        assert [response.finish_reason for response in own][-1] == "length"
    assert [response.HasField("usage") for response in responses].count(True) == 1
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 18)
    assert len({response.request_id for response in responses}) == 1


@pytest.mark.parametrize(
    ("request_message", "text"),
    [
        (
            gateway_pb2.GenerateRequest(
                tokens=gateway_pb2.TokenInput(token_ids=[66]), max_tokens=2
            ),
            "de",
        ),
        (
            gateway_pb2.GenerateRequest(
                chat=gateway_pb2.ChatInput(
                    messages=[gateway_pb2.ChatMessage(role="user", content="hi")]
                ),
                max_tokens=2,
            ),
            "ab",
        ),
        (gateway_pb2.GenerateRequest(prompt="a", stop=["de"], model=MODEL), "bc"),
        (gateway_pb2.GenerateRequest(prompt="a", max_tokens=3, gamma=0), "bcd"),
    ],
    ids=str,
)
async def test_every_kind_of_input_is_taken(
    stub: gateway_pb2_grpc.InferenceStub, request_message: gateway_pb2.GenerateRequest, text: str
) -> None:
    responses = await _generate(stub, request_message)
    assert "".join(response.text for response in responses) == text


@pytest.mark.parametrize(
    ("request_message", "param"),
    [
        (gateway_pb2.GenerateRequest(), "input"),
        (gateway_pb2.GenerateRequest(prompt=""), "prompt"),
        (gateway_pb2.GenerateRequest(tokens=gateway_pb2.TokenInput()), "prompt"),
        (gateway_pb2.GenerateRequest(chat=gateway_pb2.ChatInput()), "messages"),
        (gateway_pb2.GenerateRequest(prompt="a", n=0), "n"),
        (gateway_pb2.GenerateRequest(prompt="a", max_tokens=0), "max_tokens"),
        (gateway_pb2.GenerateRequest(prompt="a", temperature=float("nan")), "temperature"),
        (gateway_pb2.GenerateRequest(prompt="a", top_p=0), "top_p"),
        (gateway_pb2.GenerateRequest(prompt="a", gamma=65), "gamma"),
        (gateway_pb2.GenerateRequest(prompt="a", stop=[""]), "stop"),
    ],
    ids=str,
)
async def test_a_bad_request_is_an_invalid_argument_that_names_the_field(
    stub: gateway_pb2_grpc.InferenceStub, request_message: gateway_pb2.GenerateRequest, param: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _generate(stub, request_message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_status(caught.value, peer="gateway")
    assert isinstance(error, InvalidRequest)
    assert error.param == param


async def test_an_unknown_model_is_not_found(stub: gateway_pb2_grpc.InferenceStub) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await _generate(stub, gateway_pb2.GenerateRequest(prompt="a", model="gpt-9"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_cancelling_the_call_cancels_the_request(
    rig: GatewayRig, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    rig.target.gate.clear()
    call = stub.Generate(gateway_pb2.GenerateRequest(prompt="a"), timeout=30)
    reading = aiter(call)
    await assert_eventually(lambda: rig.target.num_at_gate == 1)
    call.cancel()
    await assert_eventually(lambda: not rig.target.opened and rig.target.num_at_gate == 0)
    del reading


async def test_a_request_is_cancelled_by_its_id(
    rig: GatewayRig, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    call = stub.Generate(gateway_pb2.GenerateRequest(prompt="a", gamma=0), timeout=30)
    reading = aiter(call)
    first = await anext(reading)
    rig.target.gate.clear()
    cancel = gateway_pb2.CancelRequest(request_id=first.request_id)
    assert (await stub.Cancel(cancel, timeout=5)).was_live
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in reading:
            pass
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    await assert_eventually(lambda: not rig.target.opened)
    assert not (await stub.Cancel(cancel, timeout=5)).was_live


async def test_the_callers_deadline_bounds_the_request(
    rig: GatewayRig, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    rig.target.gate.clear()
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in stub.Generate(gateway_pb2.GenerateRequest(prompt="a"), timeout=0.5):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await assert_eventually(lambda: not rig.target.opened)


async def test_the_models_are_listed(stub: gateway_pb2_grpc.InferenceStub) -> None:
    models = (await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5)).models
    assert [(model.name, model.max_context_tokens) for model in models] == [(MODEL, 256)]


async def test_health_follows_the_drain(rig: GatewayRig, channel: aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="headrace.v1.Inference")
    response = health_pb2.HealthCheckResponse
    assert (await health.Check(request, timeout=5)).status == response.SERVING
    await rig.gateway.drain(grace_s=0)
    assert (await health.Check(request, timeout=5)).status == response.NOT_SERVING
