"""The draft process: config, telemetry, model, serve."""

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Environment
from headrace.gather import QuietWindow
from headrace.model.batch_loop import BatchLoop
from headrace.model.checkpoint import Checkpoint
from headrace.model.compute_thread import ComputeThread
from headrace.model.device import open_device
from headrace.model.engine import Engine
from headrace.model.sequences import SequenceTable
from headrace.model.vocabulary import load_vocabulary
from headrace.process import run_process
from headrace.rpc import draft_pb2, draft_pb2_grpc
from headrace.rpc.server import RpcServer
from headrace.types import ModelInfo
from services.draft.drafting import Drafted, Drafter, ProposeJob
from services.draft.proposer import Proposer
from services.draft.servicer import DraftServicer

logger = logging.getLogger(__name__)

_SERVICE_NAME = draft_pb2.DESCRIPTOR.services_by_name["Draft"].full_name
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the draft process."""

    draft_dir: Path
    address: str
    kv_tokens: int
    max_row_tokens: int
    num_threads: int
    device: str

    @classmethod
    def from_environment(cls, environment: Environment) -> "Config":
        """Read the settings; raises ConfigError naming what is wrong."""
        return cls(
            draft_dir=environment.directory("HEADRACE_DRAFT_DIR"),
            address=environment.text("HEADRACE_DRAFT_ADDRESS"),
            kv_tokens=environment.integer("HEADRACE_DRAFT_KV_TOKENS", 16_384, minimum=16),
            max_row_tokens=environment.integer("HEADRACE_DRAFT_ROW_TOKENS", 128, minimum=1),
            num_threads=environment.integer("HEADRACE_THREADS", os.cpu_count() or 1, minimum=1),
            device=environment.text("HEADRACE_DEVICE", "auto"),
        )


async def main(environment: Environment) -> None:
    """Serve until a signal."""
    config = Config.from_environment(environment)
    compute = ComputeThread(config.num_threads)
    checkpoint = Checkpoint.open(config.draft_dir)
    device = await compute.run(open_device, config.device)
    engine = await compute.run(
        Engine.resident, checkpoint, kv_tokens=config.kv_tokens, device=device
    )
    vocabulary = await asyncio.to_thread(load_vocabulary, config.draft_dir)
    table: SequenceTable[Drafted] = SequenceTable(
        engine.cache, vocab_size=engine.vocab_size, max_context_tokens=engine.max_context_tokens
    )
    drafter = Drafter(
        engine,
        num_tokens=min(vocabulary.num_tokens, engine.vocab_size),
        max_row_tokens=config.max_row_tokens,
    )
    loop: BatchLoop[ProposeJob, Drafted] = BatchLoop(
        table, drafter.run, window=QuietWindow(), compute=compute
    )
    info = ModelInfo(
        name=checkpoint.name,
        vocab_size=engine.vocab_size,
        max_context_tokens=engine.max_context_tokens,
        tokenizer_fingerprint=vocabulary.fingerprint,
        num_layers=engine.num_layers,
        kv_capacity_tokens=engine.cache.capacity,
    )
    proposer = Proposer(loop, max_context_tokens=engine.max_context_tokens)
    server = RpcServer(address=config.address, service_names=[_SERVICE_NAME])
    draft_pb2_grpc.add_DraftServicer_to_server(DraftServicer(proposer, info), server.server)
    logger.info("serving %s, %d layers", checkpoint.name, engine.num_layers)
    await server.run_until_signal(loop.run(), grace_s=_GRACE_S)


if __name__ == "__main__":
    run_process("draft", main)
