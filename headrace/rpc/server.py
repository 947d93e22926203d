"""A gRPC server as every process runs it: errors, traces, deadlines, health, reflection, signals.

Knows nothing of what the services do.
"""

import asyncio
import logging
import signal
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import context as otel_context

from headrace import telemetry
from headrace.errors import ConfigError, HeadraceError
from headrace.rpc.deadline import deadline_after

logger = logging.getLogger(__name__)

Context = aio.ServicerContext[Any, Any]

ERROR_NAME_KEY = "headrace-error"
ERROR_PARAM_KEY = "headrace-error-param"

# Sweeps are long and silent: both sides ping, and the server tolerates the client's pings.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)

MAX_MESSAGE_BYTES = 4 << 20
"""What gRPC takes by default."""
MAX_MODEL_MESSAGE_BYTES = 64 << 20
"""For messages that list all units of a model: a million of them."""


def message_limit(max_bytes: int) -> tuple[str, int]:
    """The option that bounds a message on the side that receives it."""
    return ("grpc.max_receive_message_length", max_bytes)


class RpcServer:
    """One listening server with health checking and reflection.

    Health answers NOT_SERVING until `set_serving` and again from the first signal on.
    """

    def __init__(
        self,
        *,
        address: str,
        service_names: Sequence[str],
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Prepare a server.

        Args:
            address: "host:port" (port 0 picks one) or "unix:/path".
            service_names: Full names of the services that will be registered.
            max_message_bytes: Largest request.
        """
        options = (*SERVER_OPTIONS, message_limit(max_message_bytes))
        self.server = aio.server(interceptors=[_CallInterceptor()], options=options)
        self.address = address
        self._service_names = ["", *service_names]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )

    async def start(self) -> None:
        """Listen; afterwards `address` holds the real port."""
        await self._set_all(is_serving=False)
        try:
            port = self.server.add_insecure_port(self.address)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {self.address}: free it or choose another"
            ) from None
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rsplit(':', 1)[0]}:{port}"
        await self.server.start()

    async def set_serving(self) -> None:
        """Answer SERVING from now on."""
        await self._set_all(is_serving=True)

    async def run_until_signal(
        self,
        *background: Coroutine[Any, Any, None],
        grace_s: float,
        on_signal: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve, with coroutines beside it, until a signal; then stop all of it.

        Args:
            background: Run until the last call has ended.
            grace_s: For live calls.
            on_signal: Ends calls that would not end by themselves.
        """
        await self.start()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in background]
            await self.set_serving()
            await Signals().wait()
            on_signal()
            await self.stop(grace_s)
            for task in running:
                task.cancel()

    async def drain(self) -> None:
        """Answer NOT_SERVING for good; calls still work."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let live ones finish for grace_s, then cancel them."""
        await self.drain()
        await self.server.stop(grace_s)

    async def _set_all(self, *, is_serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)


class Signals:
    """SIGTERM and SIGINT, one after the other."""

    def __init__(self) -> None:
        """Catch them from now on."""
        self._received: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received.put_nowait, None)

    async def wait(self) -> None:
        """Return at the next one."""
        await self._received.get()
        logger.info("stopping on a signal")


class _CallInterceptor(aio.ServerInterceptor):
    """Gives each call its trace context and deadline, and maps errors to a status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        kwargs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(_wrap_unary(handler.unary_unary), **kwargs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _wrap_stream(handler.unary_stream), **kwargs
            )
        return grpc.stream_stream_rpc_method_handler(_wrap_stream(handler.stream_stream), **kwargs)


def _wrap_unary(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Any:
    async def wrapped(request: Any, context: Context) -> Any:
        with _call_scope(context):
            try:
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                await _abort(context, error)

    return wrapped


def _wrap_stream(behaviour: Callable[[Any, Context], AsyncGenerator[Any]]) -> Any:
    # A coroutine, not a generator: gRPC abandons a generator when a write is cancelled, and its
    # cleanup would come late and in another context.
    async def wrapped(request: Any, context: Context) -> None:
        with _call_scope(context):
            try:
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)
            except Exception as error:  # noqa: BLE001 - the boundary of the process
                await _abort(context, error)

    return wrapped


@contextmanager
def _call_scope(context: Context) -> Iterator[None]:
    metadata = context.invocation_metadata() or ()
    headers = {key: value for key, value in metadata if isinstance(value, str)}
    with ExitStack() as stack:
        token = otel_context.attach(telemetry.extract(headers))
        stack.callback(otel_context.detach, token)
        stack.enter_context(deadline_after(context.time_remaining()))
        yield


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, aio.AbortError):
        raise error
    if not isinstance(error, HeadraceError):
        logger.error("unexpected error in a call", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; see this process's log")
    trailing = [(ERROR_NAME_KEY, type(error).__name__)]
    param = getattr(error, "param", None)
    if param is not None:
        trailing.append((ERROR_PARAM_KEY, param))
    await context.abort(error.status, error.message, tuple(trailing))
