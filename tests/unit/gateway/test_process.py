"""The gateway as a process of its own."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.fake_peers import FakeTarget, model_info, serving


async def _start(**environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "gateway"),
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.slow
async def test_sigterm_ends_the_process_cleanly(toy_model_dir: Path, redis_url: str) -> None:
    async with serving(FakeTarget(info=model_info("toy")), address="127.0.0.1:0") as address:
        process = await _start(
            HEADRACE_TARGET_DIR=str(toy_model_dir),
            HEADRACE_TARGET_ADDRESS=address,
            HEADRACE_HTTP_ADDRESS="127.0.0.1:0",
            HEADRACE_GRPC_ADDRESS="127.0.0.1:0",
            REDIS_URL=redis_url,
        )
        assert process.stderr is not None
        line = b""
        while b" on 127.0.0.1:" not in line:
            line = await process.stderr.readline()
            assert line, "the gateway ended before it served"
        url = "http://" + line.decode().split(" on ")[-1].strip()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
            answer = await client.post(
                f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}
            )
            assert answer.json()["choices"][0]["text"] == "bcd"
        process.send_signal(signal.SIGTERM)
        log = await process.stderr.read()
        assert await process.wait() == 0
        assert b"Traceback" not in log
        assert b"bcd" not in log


@pytest.mark.slow
async def test_a_missing_setting_ends_the_process_with_its_name(toy_model_dir: Path) -> None:
    process = await _start(HEADRACE_TARGET_DIR=str(toy_model_dir), HEADRACE_TARGET_ADDRESS="")
    _, log = await process.communicate()
    assert process.returncode == 1
    assert b"HEADRACE_TARGET_ADDRESS is not set" in log
    assert b"Traceback" not in log
