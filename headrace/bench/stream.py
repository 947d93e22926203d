"""`headrace bench stream`: our sweeps beside fio, round by round, as the disk drifts."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.fio import disk_gb_per_s, require_fio
from headrace.bench.memory_cap import memory_cap
from headrace.bench.page_cache import evict
from headrace.bench.sweeps import SweepSample
from headrace.bench.system import RunningSystem, running_system
from headrace.model.checkpoint import Checkpoint

_NUM_SWEEPS = 3
"""Of each kind in each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """fio, then our sweeps."""

    disk_gb_per_s: float
    samples: dict[int, SweepSample]
    """By tokens in the sweep."""

    @property
    def stream_gb_per_s(self) -> float:
        """Of all sweeps together."""
        num_bytes = sum(sample.num_bytes for sample in self.samples.values())
        return num_bytes / sum(sample.elapsed_s for sample in self.samples.values()) / 1e9

    @property
    def ratio(self) -> float:
        """Ours to the disk's."""
        return self.stream_gb_per_s / self.disk_gb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """What came out."""

    rounds: Sequence[Round]
    peak_rss_bytes: dict[str, int]
    model_bytes: int
    memory_cap_bytes: int | None

    def as_object(self) -> dict[str, Any]:
        """As JSON has it: medians over the rounds.

        The idle share is that of the kind of sweep that leaves the disk idle longest.
        """
        return {
            "disk_gb_per_s": round(median(r.disk_gb_per_s for r in self.rounds), 3),
            "stream_gb_per_s": round(median(r.stream_gb_per_s for r in self.rounds), 3),
            "ratio": round(median(r.ratio for r in self.rounds), 3),
            "sweeps": [
                {"tokens": tokens, "seconds": round(self._median(tokens, _seconds), 4)}
                for tokens in self.rounds[0].samples
            ],
            "disk_idle_share": round(
                max(self._median(tokens, _idle) for tokens in self.rounds[0].samples), 4
            ),
            "peak_rss_bytes": self.peak_rss_bytes,
            "model_bytes": self.model_bytes,
            "memory_cap_bytes": self.memory_cap_bytes,
        }

    def _median(self, tokens: int, figure: Callable[[SweepSample], float]) -> float:
        return median(figure(r.samples[tokens]) for r in self.rounds)


async def measure_stream(
    target_dir: Path,
    *,
    memory_bytes: int,
    num_rounds: int,
    num_tokens: Sequence[int],
    say: Callable[[str], None],
) -> StreamReport:
    """Measure fio and ourselves in turn.

    Args:
        target_dir: Model directory.
        memory_bytes: Cap of target and streamer together, and what their envelope divides.
        num_rounds: At least 1.
        num_tokens: In a sweep, of each kind of sweep.
        say: Hears how it goes, line by line.

    Raises:
        HeadraceError: fio is missing, the memory is too small, or a process fails.
    """
    require_fio()
    checkpoint = Checkpoint.open(target_dir)
    evict(checkpoint.files)
    with memory_cap(memory_bytes) as cap:
        if cap.num_bytes is None:
            say("no memory cap: only root may set one, in a control group; going on without")
        async with running_system(target_dir, budget_bytes=memory_bytes, cap=cap) as system:
            rounds = []
            for index in range(num_rounds):
                rounds.append(await _measure_round(system, checkpoint, num_tokens))
                say(_round_line(index, rounds[-1]))
            return StreamReport(
                rounds=rounds,
                peak_rss_bytes=system.peak_rss_bytes(),
                model_bytes=checkpoint.num_bytes,
                memory_cap_bytes=cap.num_bytes,
            )


async def _measure_round(
    system: RunningSystem, checkpoint: Checkpoint, num_tokens: Sequence[int]
) -> Round:
    await system.driver.rest()
    largest = max(checkpoint.files, key=lambda file: file.stat().st_size)
    disk = await asyncio.to_thread(disk_gb_per_s, largest)
    samples = {
        tokens: await system.driver.sample(num_tokens=tokens, num_sweeps=_NUM_SWEEPS)
        for tokens in num_tokens
    }
    return Round(disk_gb_per_s=disk, samples=samples)


def _round_line(index: int, measured: Round) -> str:
    sweeps = ", ".join(f"{t}: {_seconds(sample):.3f}" for t, sample in measured.samples.items())
    return (
        f"round {index + 1}: disk {measured.disk_gb_per_s:.2f} GB/s, stream "
        f"{measured.stream_gb_per_s:.2f} GB/s ({measured.ratio:.0%}); seconds a sweep by tokens: "
        f"{sweeps}"
    )


def _seconds(sample: SweepSample) -> float:
    return sample.seconds_per_sweep


def _idle(sample: SweepSample) -> float:
    return sample.idle_share
