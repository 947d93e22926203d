"""The streamer process: config, telemetry, serve."""

import logging
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Environment
from headrace.errors import ConfigError
from headrace.model.checkpoint import Checkpoint
from headrace.process import run_process
from headrace.rpc import streamer_pb2, streamer_pb2_grpc
from headrace.rpc.server import MAX_MODEL_MESSAGE_BYTES, RpcServer
from services.streamer.layout import ALIGNMENT_BYTES
from services.streamer.reader import Reader
from services.streamer.registry import StreamRegistry
from services.streamer.ring import remove_abandoned
from services.streamer.servicer import StreamerServicer

logger = logging.getLogger(__name__)

_SERVICE_NAME = streamer_pb2.DESCRIPTOR.services_by_name["Streamer"].full_name
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of the streamer process."""

    target_dir: Path
    address: str
    shared_memory_dir: Path
    num_readers: int
    chunk_bytes: int

    @classmethod
    def from_environment(cls, environment: Environment) -> "Config":
        """Read the settings; raises ConfigError naming what is wrong."""
        chunk_bytes = environment.integer("HEADRACE_STREAMER_CHUNK_BYTES", 4 << 20, minimum=1)
        if chunk_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"HEADRACE_STREAMER_CHUNK_BYTES={chunk_bytes} is no multiple of {ALIGNMENT_BYTES}"
            )
        return cls(
            target_dir=environment.directory("HEADRACE_TARGET_DIR"),
            address=environment.text("HEADRACE_STREAMER_ADDRESS"),
            shared_memory_dir=environment.directory("HEADRACE_SHM_DIR", Path("/dev/shm")),
            num_readers=environment.integer("HEADRACE_STREAMER_READERS", 8, minimum=1),
            chunk_bytes=chunk_bytes,
        )


async def main(environment: Environment) -> None:
    """Serve until a signal."""
    config = Config.from_environment(environment)
    checkpoint = Checkpoint.open(config.target_dir)
    remove_abandoned(config.shared_memory_dir)
    registry = StreamRegistry(
        checkpoint,
        Reader(checkpoint.files),
        shared_memory_dir=config.shared_memory_dir,
        num_readers=config.num_readers,
        chunk_bytes=config.chunk_bytes,
    )
    server = RpcServer(
        address=config.address,
        service_names=[_SERVICE_NAME],
        max_message_bytes=MAX_MODEL_MESSAGE_BYTES,
    )
    streamer_pb2_grpc.add_StreamerServicer_to_server(StreamerServicer(registry), server.server)
    logger.info("streaming %s, %d tensors", checkpoint.name, len(checkpoint.tensors))
    await server.run_until_signal(grace_s=_GRACE_S, on_signal=registry.stop)


if __name__ == "__main__":
    run_process("streamer", main)
