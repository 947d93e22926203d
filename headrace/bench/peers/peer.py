"""What every system that is compared must do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.bench.memory_cap import MemoryCap
from headrace.model.checkpoint import Checkpoint

NUM_REQUESTS = 16
NUM_TOKENS = 3
"""Generated and timed for each request, after a first one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same for every system."""

    target: Checkpoint
    draft_dir: Path | None
    memory_bytes: int
    cap: MemoryCap
    cache: Path
    """Where environments and converted models live."""

    def converted(self, kind: str) -> Path:
        """Where a copy of the target in a peer's own form belongs."""
        return (
            self.cache / f"{kind}-models" / f"{self.target.name}-{self.target.fingerprint()[:16]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One measurement of one system."""

    seconds_per_token: float
    """One request alone."""
    tokens_per_s_16: float
    """16 requests together."""
    peak_rss_bytes: int
    """Of all its processes, memory that they share counted for each."""


class Peer(Protocol):
    """A system."""

    @property
    def name(self) -> str:
        """As the rows have it."""
        ...

    async def prepare(self) -> str:
        """Install it and convert the model, where that is not done yet; its version.

        Raises:
            HeadraceError: It cannot be had here.
        """
        ...

    async def measure(self) -> Figures:
        """Start it within the cap, generate, stop it.

        Raises:
            HeadraceError: It fails.
        """
        ...

    def files(self) -> Sequence[Path]:
        """What it reads weights from."""
        ...
