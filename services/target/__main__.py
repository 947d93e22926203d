"""The target process: config, telemetry, model, serve."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Environment
from headrace.gather import ReturnWindow
from headrace.model.batch_loop import BatchLoop
from headrace.model.checkpoint import Checkpoint
from headrace.model.compute_thread import ComputeThread
from headrace.model.decoder import Decoder
from headrace.model.device import open_device
from headrace.model.engine import Engine
from headrace.model.sequences import SequenceTable
from headrace.model.vocabulary import load_vocabulary
from headrace.process import run_process
from headrace.rpc import target_pb2, target_pb2_grpc
from headrace.rpc.server import RpcServer
from headrace.types import ModelInfo, Verdict
from services.target.servicer import TargetServicer
from services.target.sweep import Sweeper, VerifyJob
from services.target.verifier import Verifier
from services.target.weight_feed import WeightFeed

logger = logging.getLogger(__name__)

_SERVICE_NAME = target_pb2.DESCRIPTOR.services_by_name["Target"].full_name
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the target process."""

    target_dir: Path
    address: str
    streamer_address: str | None
    """None: the weights are loaded to stay."""
    num_slots: int
    slot_bytes: int
    """Size to aim at: what one lease lends."""
    resident_bytes: int
    """Of what a sweep uses, how much stays in memory."""
    kv_tokens: int
    max_sweep_tokens: int
    num_threads: int
    device: str

    @classmethod
    def from_environment(cls, environment: Environment) -> "Config":
        """Read the settings; raises ConfigError naming what is wrong."""
        return cls(
            target_dir=environment.directory("HEADRACE_TARGET_DIR"),
            address=environment.text("HEADRACE_TARGET_ADDRESS"),
            streamer_address=environment.optional_text("HEADRACE_STREAMER_ADDRESS"),
            num_slots=environment.integer("HEADRACE_SLOTS", 8, minimum=1),
            slot_bytes=environment.integer("HEADRACE_SLOT_BYTES", 32 << 20, minimum=4096),
            resident_bytes=environment.integer("HEADRACE_RESIDENT_BYTES", 0),
            kv_tokens=environment.integer("HEADRACE_TARGET_KV_TOKENS", 16_384, minimum=16),
            max_sweep_tokens=environment.integer("HEADRACE_MAX_SWEEP_TOKENS", 256, minimum=1),
            num_threads=environment.integer("HEADRACE_THREADS", os.cpu_count() or 1, minimum=1),
            device=environment.text("HEADRACE_DEVICE", "auto"),
        )


async def main(environment: Environment) -> None:
    """Serve until a signal."""
    config = Config.from_environment(environment)
    compute = ComputeThread(config.num_threads)
    device = await compute.run(open_device, config.device)
    checkpoint = Checkpoint.open(config.target_dir)
    decoder = await compute.run(Decoder, checkpoint, device=device)
    if config.streamer_address is None:
        await compute.run(decoder.load)
        await _serve(config, decoder, None, compute)
        return
    plan = await compute.run(decoder.plan, unit_bytes=config.slot_bytes)
    plan = plan.keeping(config.resident_bytes)
    feed = await WeightFeed.open(
        config.streamer_address, checkpoint, plan, num_slots=config.num_slots, device=device
    )
    try:
        await compute.run(decoder.stream, plan, feed)
        await _serve(config, decoder, feed, compute)
    finally:
        await feed.close()


async def _serve(
    config: Config, decoder: Decoder, feed: WeightFeed | None, compute: ComputeThread
) -> None:
    engine = await compute.run(Engine, decoder, kv_tokens=config.kv_tokens)
    vocabulary = await asyncio.to_thread(load_vocabulary, config.target_dir)
    sweeper = Sweeper(engine, feed, max_sweep_tokens=config.max_sweep_tokens)
    table: SequenceTable[Verdict] = SequenceTable(
        engine.cache, vocab_size=engine.vocab_size, max_context_tokens=engine.max_context_tokens
    )
    loop: BatchLoop[VerifyJob, Verdict] = BatchLoop(
        table, sweeper.run, window=ReturnWindow(), compute=compute
    )
    info = ModelInfo(
        name=decoder.checkpoint.name,
        vocab_size=engine.vocab_size,
        max_context_tokens=engine.max_context_tokens,
        tokenizer_fingerprint=vocabulary.fingerprint,
        num_layers=engine.num_layers,
        kv_capacity_tokens=engine.cache.capacity,
        streamed_bytes_per_sweep=0 if feed is None else feed.bytes_per_sweep,
    )
    server = RpcServer(address=config.address, service_names=[_SERVICE_NAME])
    target_pb2_grpc.add_TargetServicer_to_server(
        TargetServicer(Verifier(loop), info), server.server
    )
    logger.info("serving %s, %d layers", info.name, engine.num_layers)
    await server.run_until_signal(loop.run(), grace_s=_GRACE_S)


if __name__ == "__main__":
    run_process("target", main)
