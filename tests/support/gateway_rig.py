"""A real gateway on loopback, between fake peers and a real Redis."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from gateway.config import Config
from gateway.gateway import Gateway, running_gateway
from headrace.config import Environment
from tests.support.fake_peers import FakeDraft, FakeTarget, model_info, serving
from tests.support.tiny_models import EOS_ID, save_tokenizer

MODEL = "toy-target"


def save_toy_model(directory: Path) -> Path:
    """What the gateway reads of a model directory: the tokenizer and its end-of-sequence token."""
    save_tokenizer(directory)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": EOS_ID})
    )
    return directory


@dataclass(kw_only=True)
class GatewayRig:
    """What a test talks to and looks into."""

    gateway: Gateway
    target: FakeTarget
    draft: FakeDraft
    openai: AsyncOpenAI
    http: httpx.AsyncClient

    async def complete(self, prompt: str = "a", **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, whatever its status."""
        response = await self.http.post("/v1/completions", json={"prompt": prompt, **body})
        answer: dict[str, Any] = response.json()
        return answer

    async def text(self, prompt: str = "a", **body: Any) -> str:
        """The text of the only choice."""
        answer = await self.complete(prompt, **body)
        text: str = answer["choices"][0]["text"]
        return text


@asynccontextmanager
async def gateway_rig(
    model_dir: Path,
    redis_url: str,
    *,
    has_draft: bool = True,
    target: FakeTarget | None = None,
    draft: FakeDraft | None = None,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[GatewayRig]:
    """A running gateway.

    Args:
        model_dir: From save_toy_model.
        redis_url: A real Redis.
        has_draft: Whether the gateway knows of the draft.
        target: Instead of a plain fake.
        draft: Instead of one that is always right.
        settings: More environment variables, without their prefix.
    """
    target = target or FakeTarget(info=model_info(MODEL))
    draft = draft or FakeDraft(info=model_info("toy-draft"))
    async with AsyncExitStack() as stack:
        target_address = await stack.enter_async_context(serving(target, address="127.0.0.1:0"))
        draft_address = await stack.enter_async_context(serving(draft, address="127.0.0.1:0"))
        environment = {
            "HEADRACE_TARGET_DIR": str(model_dir),
            "HEADRACE_TARGET_ADDRESS": target_address,
            "HEADRACE_DRAFT_ADDRESS": draft_address if has_draft else "",
            "REDIS_URL": redis_url,
            "HEADRACE_HTTP_ADDRESS": "127.0.0.1:0",
            "HEADRACE_GRPC_ADDRESS": "127.0.0.1:0",
            **{f"HEADRACE_{name}": value for name, value in (settings or {}).items()},
        }
        config = Config.from_environment(Environment(environment))
        gateway = await stack.enter_async_context(running_gateway(config))
        url = f"http://{gateway.http_address}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        openai = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        )
        yield GatewayRig(gateway=gateway, target=target, draft=draft, openai=openai, http=http)
