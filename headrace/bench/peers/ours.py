"""Headrace itself, without speculation."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from headrace.bench.peers.peer import NUM_REQUESTS, NUM_TOKENS, Figures, Workload
from headrace.bench.system import running_system


class Headrace:
    """Target and streamer, driven directly."""

    name = "headrace"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    async def prepare(self) -> str:
        """See Peer."""
        return version("headrace")

    async def measure(self) -> Figures:
        """See Peer."""
        async with running_system(
            self._workload.target.directory,
            budget_bytes=self._workload.memory_bytes,
            cap=self._workload.cap,
        ) as system:
            alone = await system.driver.sample(num_tokens=1, num_sweeps=NUM_TOKENS)
            together = await system.driver.sample(
                num_tokens=1, num_sweeps=NUM_TOKENS, num_sequences=NUM_REQUESTS
            )
            return Figures(
                seconds_per_token=alone.seconds_per_sweep,
                tokens_per_s_16=NUM_REQUESTS / together.seconds_per_sweep,
                peak_rss_bytes=sum(system.peak_rss_bytes().values()),
            )

    def files(self) -> Sequence[Path]:
        """See Peer."""
        return self._workload.target.files
