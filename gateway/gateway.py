"""The whole gateway, put together: listen, wait for the peers, serve, drain, stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from grpc import aio

from gateway.admission import Admission
from gateway.app import create_app
from gateway.batcher import Batcher
from gateway.config import Config
from gateway.generation import Backend
from gateway.generations import Generations
from gateway.http_server import HttpServer
from gateway.inference import Inference, Readiness
from gateway.intake import Intake
from gateway.metrics import Metrics
from gateway.models import Models, wait_for_models
from gateway.peers import DraftPeer, TargetPeer
from gateway.servicer import InferenceServicer
from gateway.store import Store
from gateway.task_group import task_group
from gateway.tokenizer import Tokenizer
from headrace.rpc import gateway_pb2, gateway_pb2_grpc
from headrace.rpc.client import open_channel
from headrace.rpc.server import RpcServer

logger = logging.getLogger(__name__)

_SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_RPC_GRACE_S = 0.2


class Gateway:
    """One gateway; `running_gateway` is the way to get one."""

    def __init__(self, *, http_address: str, rpc_address: str) -> None:
        """Prepare both servers.

        Args:
            http_address: "host:port".
            rpc_address: "host:port" or "unix:/path".

        Raises:
            ConfigError: The HTTP address is malformed or taken.
        """
        self.readiness = Readiness()
        self._http = HttpServer(create_app(self.readiness), address=http_address)
        self._rpc = RpcServer(address=rpc_address, service_names=[_SERVICE_NAME])
        gateway_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(self.readiness), self._rpc.server
        )
        self._generations: Generations | None = None

    @property
    def http_address(self) -> str:
        """Where HTTP is served, "host:port"."""
        return self._http.address

    @property
    def rpc_address(self) -> str:
        """Where gRPC is served."""
        return self._rpc.address

    async def listen(self, stack: AsyncExitStack) -> None:
        """Answer on both ports, with 503 and NOT_SERVING for now; the stack ends it."""
        stack.callback(self._http.close)
        await self._rpc.start()
        stack.push_async_callback(self._rpc.stop, _RPC_GRACE_S)
        group = await stack.enter_async_context(task_group())
        group.create_task(self._http.serve())
        stack.push_async_callback(self._http.stop)

    async def open(self, inference: Inference, generations: Generations) -> None:
        """Let requests in."""
        self._generations = generations
        self.readiness.open(inference)
        await self._rpc.set_serving()

    async def drain(
        self, grace_s: float, *, hurry: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Take no new requests; let the live ones finish for a while, then cancel them.

        Args:
            grace_s: How long.
            hurry: Returns when they are to be cancelled at once.
        """
        self.readiness.close()
        await self._rpc.drain()
        if self._generations is not None:
            await self._generations.drain(grace_s, hurry=hurry)


@asynccontextmanager
async def running_gateway(config: Config) -> AsyncIterator[Gateway]:
    """A gateway from its start to its end.

    Raises:
        ConfigError: It cannot start; the message says why and what to do.
    """
    async with AsyncExitStack() as stack:
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.target_dir)
        stack.callback(tokenizer.close)
        store = await Store.connect(
            config.redis_url, lease_s=config.owner_lease_s, ttl_s=config.request_ttl_s
        )
        stack.push_async_callback(store.close)
        gateway = Gateway(http_address=config.http_address, rpc_address=config.rpc_address)
        await gateway.listen(stack)
        target = TargetPeer(_open_channel(config.target_address, stack))
        draft = None
        if config.draft_address is not None:
            draft = DraftPeer(_open_channel(config.draft_address, stack))
        models = await wait_for_models(
            target, draft, num_tokens=tokenizer.num_tokens, timeout_s=config.start_timeout_s
        )
        backend = _backend(config, models, tokenizer=tokenizer, store=store)
        generations = Generations(
            backend, request_timeout_s=config.request_timeout_s, lease_s=config.owner_lease_s
        )
        await stack.enter_async_context(generations)
        await gateway.open(_inference(config, models, backend, generations), generations)
        logger.info("serving %s on %s", backend.model_name, gateway.http_address)
        yield gateway


def _open_channel(address: str, stack: AsyncExitStack) -> aio.Channel:
    channel = open_channel(address)
    stack.push_async_callback(channel.close)
    return channel


def _backend(config: Config, models: Models, *, tokenizer: Tokenizer, store: Store) -> Backend:
    batcher = Batcher(max_live=config.max_live_sequences, max_waiting=config.max_waiting_sequences)
    model_name = config.model_name or models.target_info.name
    metrics = Metrics(model_name)
    backend = Backend(
        model_name=model_name,
        tokenizer=tokenizer,
        models=models,
        store=store,
        admission=Admission(batcher),
        metrics=metrics,
    )
    metrics.track("num_requests_running", "Sequences that run", lambda: batcher.num_live)
    metrics.track("num_requests_waiting", "Sequences that wait", lambda: batcher.num_waiting)
    metrics.track("kv_cache_usage_perc", "Used share of the target's KV", backend.kv_usage)
    return backend


def _inference(
    config: Config, models: Models, backend: Backend, generations: Generations
) -> Inference:
    intake = Intake(
        model_name=backend.model_name,
        tokenizer=backend.tokenizer,
        max_length=models.max_length,
        default_max_tokens=config.default_max_tokens,
        default_gamma=config.gamma,
    )
    return Inference(intake=intake, generations=generations, metrics=backend.metrics)
