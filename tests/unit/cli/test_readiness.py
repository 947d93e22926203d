"""Each probe tells a process that loads from one that serves, and from none at all."""

import asyncio
import os
from pathlib import Path

from headrace.cli.child import Child
from headrace.cli.readiness import GrpcProbe, HttpProbe, Readiness, RedisProbe
from headrace.cli.redis_server import redis_command
from headrace.cli.wiring import ProcessSpec
from headrace.rpc.server import RpcServer


async def test_a_grpc_process_is_starting_then_loading_then_ready(tmp_path: Path) -> None:
    probe = GrpcProbe(name="target", socket=tmp_path / "target.sock")
    assert await probe.check() is Readiness.STARTING
    server = RpcServer(address=f"unix:{probe.socket}", service_names=["headrace.v1.Target"])
    await server.start()
    assert await probe.check() is Readiness.LOADING
    await server.set_serving()
    assert await probe.check() is Readiness.READY
    await server.stop(grace_s=0.0)


async def test_a_stale_socket_file_is_starting(tmp_path: Path) -> None:
    socket = tmp_path / "target.sock"
    socket.touch()
    assert await GrpcProbe(name="target", socket=socket).check() is Readiness.STARTING


async def test_the_embedded_redis_becomes_ready_and_persists(tmp_path: Path) -> None:
    probe = RedisProbe(socket=tmp_path / "redis.sock")
    assert await probe.check() is Readiness.STARTING
    spec = ProcessSpec(
        name="redis",
        command=redis_command(tmp_path, probe.socket),
        environment=os.environ,
        probe=probe,
    )
    child = await Child.start(spec, tmp_path)
    try:
        async with asyncio.timeout(5.0):
            while await probe.check() is not Readiness.READY:
                assert child.is_running, child.last_words()
        assert list((tmp_path / "appendonlydir").glob("*.aof"))
    finally:
        await child.stop(grace_s=5.0)


async def test_an_http_process_that_does_not_listen_is_starting() -> None:
    # Port 1 needs privileges that no test server has.
    assert await HttpProbe(url="http://127.0.0.1:1/health").check() is Readiness.STARTING
