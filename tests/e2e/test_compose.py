"""The demo pair in containers, as `make up` starts it. Set TORCH_BASE to save torch's download."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from headrace.catalog.resolve import model_path
from tests.support.composed_stack import ComposedStack, composed_stack

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposedStack]:
    with composed_stack(model_path("demo").parent) as stack:
        yield stack
    assert stack.leftovers() == []


def test_the_demo_answers_with_streamed_weights_and_a_draft(stack: ComposedStack) -> None:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    metrics = answer.model_dump()["metrics"]
    assert metrics["headrace"]["bytes_streamed"] > 0
    assert metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def test_the_gateway_serves_without_torch(stack: ComposedStack) -> None:
    assert httpx.get(f"{stack.base_url}/health").status_code == 200
    find_torch = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert stack.compose("exec", "--no-TTY", "gateway", "python", "-c", find_torch) == ["None"]


@pytest.mark.parametrize("process", ["streamer", "target", "draft", "gateway"])
def test_no_process_is_root_or_can_change_the_models(stack: ComposedStack, process: str) -> None:
    access = "import os; print(os.getuid(), os.access('/models', os.W_OK))"
    assert stack.compose("exec", "--no-TTY", process, "python", "-c", access) == ["10001 False"]


def test_every_process_ends_with_code_0_when_stopped(stack: ComposedStack) -> None:
    stack.compose("stop")
    ends = stack.compose("ps", "--all", "--format", "{{.Service}} {{.State}} {{.ExitCode}}")
    assert sorted(ends) == [
        f"{name} exited 0" for name in ("draft", "gateway", "redis", "streamer", "target")
    ]
