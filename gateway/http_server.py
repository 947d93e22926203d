"""The HTTP server inside the gateway's own loop; signals are not its business."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from headrace.errors import ConfigError

_BACKLOG = 1_024
_MAX_HEADER_BYTES = 64 * 1024
_MAX_CLOSE_S = 1


class HttpServer:
    """One listening server."""

    def __init__(self, app: ASGIApp, *, address: str) -> None:
        """Listen; connections are answered once `serve` runs.

        Args:
            app: What to serve.
            address: "host:port"; port 0 picks one.

        Raises:
            ConfigError: The address is malformed or taken.
        """
        self._socket = _listen(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_MAX_CLOSE_S,
        )
        self._server = _Server(config)
        self._has_stopped = asyncio.Event()

    async def serve(self) -> None:
        """Answer until `stop`."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._has_stopped.set()

    async def stop(self) -> None:
        """End `serve`; what is still open a moment later is cut."""
        self._server.should_exit = True
        await self._has_stopped.wait()

    def close(self) -> None:
        """Free the address."""
        self._socket.close()


class _Server(uvicorn.Server):
    """Leaves the signal handlers alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server(
            (host.strip("[]"), int(port)), family=family, backlog=_BACKLOG
        )
        # Connections inherit it: small answers and events must not wait for more to send.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except ValueError:
        raise ConfigError(
            f"HEADRACE_HTTP_ADDRESS={address} is malformed: set it to host:port"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot listen on HEADRACE_HTTP_ADDRESS={address} ({error.strerror}): "
            "free it or choose another"
        ) from None
