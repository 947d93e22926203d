"""How the launcher sees that a process serves. Each probe asks the process itself."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.errors import HeadraceError
from headrace.rpc.client import invoke, open_channel

_PROBE_TIMEOUT_S = 2.0


class Readiness(StrEnum):
    """What a probe found."""

    STARTING = "starting"
    """It does not answer yet."""
    LOADING = "loading"
    """It answers that it does not serve yet."""
    READY = "ready"


class Probe(Protocol):
    """One way to ask one process."""

    async def check(self) -> Readiness:
        """Ask once; never raises because of what the process does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcProbe:
    """Asks grpc.health.v1 on a unix socket."""

    name: str
    socket: Path

    async def check(self) -> Readiness:
        """SERVING is ready, any other answer is loading."""
        if not self.socket.exists():
            return Readiness.STARTING
        async with open_channel(f"unix:{self.socket}") as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                answer: health_pb2.HealthCheckResponse = await invoke(
                    stub.Check,  # type: ignore[attr-defined]  # its stub lists no method
                    health_pb2.HealthCheckRequest(),
                    peer=self.name,
                    timeout_s=_PROBE_TIMEOUT_S,
                )
            except HeadraceError:
                return Readiness.STARTING
        is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return Readiness.READY if is_serving else Readiness.LOADING


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpProbe:
    """Asks a health URL."""

    url: str

    async def check(self) -> Readiness:
        """200 is ready, any other answer is loading."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_PROBE_TIMEOUT_S) as client:
                response = await client.get(self.url)
        except httpx.TransportError:
            return Readiness.STARTING
        return Readiness.READY if response.status_code == httpx.codes.OK else Readiness.LOADING


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisProbe:
    """Sends PING on a unix socket."""

    socket: Path

    async def check(self) -> Readiness:
        """PONG is ready; while it reads its append-only file it answers LOADING."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return Readiness.STARTING
        try:
            writer.write(b"PING\r\n")
            answer = await asyncio.wait_for(reader.readline(), _PROBE_TIMEOUT_S)
        except (OSError, TimeoutError):
            return Readiness.STARTING
        finally:
            writer.close()
        return Readiness.READY if answer.startswith(b"+PONG") else Readiness.LOADING
