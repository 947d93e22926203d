"""Target and streamer as `headrace serve` starts them, within a memory cap, driven directly."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.bench.memory_cap import MemoryCap
from headrace.bench.processes import peak_rss_bytes, started
from headrace.bench.sweeps import SweepDriver
from headrace.cli.child import Child
from headrace.cli.options import LOOPBACK
from headrace.cli.partition import find_partition
from headrace.cli.stack import private_directories
from headrace.cli.wiring import PrivateDirectories, ProcessSpec, StackConfig, stages
from headrace.rpc import streamer_pb2_grpc, target_pb2_grpc
from headrace.rpc.client import open_channel

TARGET = "target"
STREAMER = "streamer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSystem:
    """A target that streams."""

    driver: SweepDriver
    children: list[Child]

    def peak_rss_bytes(self) -> dict[str, int]:
        """The most memory that each process had, slots included, by its name."""
        return {child.spec.name: peak_rss_bytes(child) for child in self.children}


@asynccontextmanager
async def running_system(
    target_dir: Path, *, budget_bytes: int, cap: MemoryCap
) -> AsyncIterator[RunningSystem]:
    """Start both processes and stop them at the end.

    Args:
        target_dir: Model directory.
        budget_bytes: Divided as the envelope says.
        cap: The limit that they run within.

    Raises:
        HeadraceError: The budget is too small, or a process does not start or ends by itself.
    """
    with private_directories() as directories:
        specs = await asyncio.to_thread(_specs, target_dir, budget_bytes, cap, directories)
        async with (
            started(specs, directories.run) as children,
            open_channel(f"unix:{directories.socket(TARGET)}") as target,
            open_channel(f"unix:{directories.socket(STREAMER)}") as streamer,
        ):
            driver = await SweepDriver.open(
                target_pb2_grpc.TargetStub(target), streamer_pb2_grpc.StreamerStub(streamer)
            )
            yield RunningSystem(driver=driver, children=children)


def _specs(
    target_dir: Path, budget_bytes: int, cap: MemoryCap, directories: PrivateDirectories
) -> list[ProcessSpec]:
    config = StackConfig(
        target_dir=target_dir,
        draft_dir=None,
        gamma=0,
        host=LOOPBACK,
        http_port=0,
        grpc_port=0,
        partition=find_partition(target_dir, None, memory=str(budget_bytes), weights="streamed"),
    )
    specs = {
        spec.name: replace(spec, command=cap.command(*spec.command))
        for stage in stages(config, directories, os.environ)
        for spec in stage
    }
    return [specs[STREAMER], specs[TARGET]]
