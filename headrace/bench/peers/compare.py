"""`headrace bench peers`: the same model in the same memory, round by round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.memory_cap import memory_cap
from headrace.bench.page_cache import evict
from headrace.bench.peers.llama_server import LlamaServer
from headrace.bench.peers.offloading import accelerate, airllm
from headrace.bench.peers.ours import Headrace
from headrace.bench.peers.peer import Figures, Peer, Workload
from headrace.errors import ConfigError, HeadraceError
from headrace.model.checkpoint import Checkpoint

PEERS = ("accelerate", "airllm", "llama-server")


@dataclass(slots=True, kw_only=True)
class Row:
    """One system over all rounds."""

    peer: Peer
    version: str | None = None
    rounds: list[Figures] = field(default_factory=list)
    error: str | None = None
    """Why it has no figures; it is left out of later rounds."""

    def as_object(self, model_bytes: int) -> dict[str, Any]:
        """As JSON has it: medians over the rounds.

        gb_per_s is the model's bytes over the seconds that a token takes, whatever was in memory.
        """
        row: dict[str, Any] = {"system": self.peer.name, "version": self.version}
        if self.error is not None or not self.rounds:
            return {**row, "error": self.error}
        seconds = median(figures.seconds_per_token for figures in self.rounds)
        return {
            **row,
            "gb_per_s": round(model_bytes / seconds / 1e9, 3),
            "seconds_per_token": round(seconds, 4),
            "tokens_per_s_16": round(median(f.tokens_per_s_16 for f in self.rounds), 3),
            "peak_rss_bytes": max(figures.peak_rss_bytes for figures in self.rounds),
        }


async def measure_peers(
    target_dir: Path,
    draft_dir: Path | None,
    *,
    names: Sequence[str],
    memory_bytes: int,
    num_rounds: int,
    cache: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure ourselves and peers in turn.

    Args:
        target_dir: Model directory.
        draft_dir: For llama-server's second row; None leaves it out.
        names: Which of PEERS.
        memory_bytes: Cap of each system.
        num_rounds: At least 1.
        cache: Where environments and converted models are kept.
        say: Hears how it goes, line by line.

    Returns:
        A row for each system; one that cannot be had or fails has its error instead of figures.

    Raises:
        ConfigError: A name is unknown, or the target cannot be read.
    """
    target = Checkpoint.open(target_dir)
    with memory_cap(memory_bytes) as cap:
        if cap.num_bytes is None:
            say("no memory cap: only root may set one, in a control group; going on without")
        workload = Workload(
            target=target, draft_dir=draft_dir, memory_bytes=memory_bytes, cap=cap, cache=cache
        )
        rows = [Row(peer=peer) for peer in _peers(names, workload)]
        for row in rows:
            say(f"{row.peer.name}: preparing")
            await _prepare(row)
        for index in range(num_rounds):
            for row in rows:
                await _measure(row)
                say(f"medians after round {index + 1}: {row.as_object(target.num_bytes)}")
    return [row.as_object(target.num_bytes) for row in rows]


def _peers(names: Sequence[str], workload: Workload) -> list[Peer]:
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise ConfigError(f"there is no peer {unknown[0]}: choose from {', '.join(PEERS)}")
    peers: list[Peer] = [Headrace(workload)]
    if "accelerate" in names:
        peers.append(accelerate(workload))
    if "airllm" in names:
        peers.append(airllm(workload))
    if "llama-server" in names:
        peers.append(LlamaServer(workload))
        if workload.draft_dir is not None:
            peers.append(LlamaServer(workload, draft=Checkpoint.open(workload.draft_dir)))
    return peers


async def _prepare(row: Row) -> None:
    try:
        row.version = await row.peer.prepare()
    except HeadraceError as error:
        row.error = error.message


async def _measure(row: Row) -> None:
    if row.error is not None:
        return
    evict(row.peer.files())
    try:
        row.rounds.append(await row.peer.measure())
    except HeadraceError as error:
        row.error = error.message
