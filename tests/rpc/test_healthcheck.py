"""The health check of containers, run as they run it, against a real server."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from headrace.rpc.server import RpcServer


async def healthcheck(address: str) -> tuple[int | None, str]:
    """Exit code and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace.rpc.healthcheck", "SERVER_ADDRESS"),
        env={**os.environ, "SERVER_ADDRESS": address},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode().strip()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:{tmp_path}/server.sock"])
async def test_a_server_is_healthy_while_it_serves(address: str, tmp_path: Path) -> None:
    server = RpcServer(address=address.format(tmp_path=tmp_path), service_names=[])
    await server.start()
    try:
        assert await healthcheck(server.address) == (1, "not serving")
        await server.set_serving()
        assert await healthcheck(server.address) == (0, "")
        await server.drain()
        assert await healthcheck(server.address) == (1, "not serving")
    finally:
        await server.stop(0)


async def test_an_absent_server_is_not_healthy(tmp_path: Path) -> None:
    assert await healthcheck(f"unix:{tmp_path}/server.sock") == (1, "no answer: UNAVAILABLE")


async def test_a_missing_setting_is_named() -> None:
    returncode, stderr = await healthcheck("")
    assert returncode == 1
    assert "SERVER_ADDRESS" in stderr
