"""`headrace doctor`: whether a model can be served here, how fast, and what stands in the way."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from headrace.bench.drive import DriveRate, measure_drive
from headrace.bench.processor import weights_gb_per_s
from headrace.cli.envelope import partition
from headrace.envelope import Envelope
from headrace.errors import ConfigError, HeadraceError
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.model.vocabulary import load_vocabulary
from headrace.sizes import format_bytes

T = TypeVar("T")

_DRIVE_S = 3.0
_NUM_REQUESTS = 16
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    is_ok: bool
    finding: str
    """What is; where it is not ok, also what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What to expect without speculation: a draft multiplies it by the tokens accepted a sweep."""

    seconds_per_sweep: float
    tokens_per_s: float
    """Of one request."""
    tokens_per_s_16: float
    """Of 16 requests together."""
    limited_by: Literal["drive", "processor"]


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """All checks, and a prediction if they let one be made."""

    checks: list[Check] = field(default_factory=list)
    drive: DriveRate | None = None
    prediction: Prediction | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the model can be served."""
        return all(check.is_ok for check in self.checks)

    def as_object(self) -> dict[str, Any]:
        """As JSON has it."""
        prediction = self.prediction
        return {
            "is_ok": self.is_ok,
            "checks": [
                {"name": check.name, "is_ok": check.is_ok, "finding": check.finding}
                for check in self.checks
            ],
            "drive_gb_per_s": self.drive and self.drive.gb_per_s,
            "seconds_per_sweep": prediction and prediction.seconds_per_sweep,
            "tokens_per_s": prediction and prediction.tokens_per_s,
            "tokens_per_s_16": prediction and prediction.tokens_per_s_16,
            "limited_by": prediction and prediction.limited_by,
        }

    def note(self, name: str, look: Callable[[], tuple[str, T]]) -> T | None:
        """Make one check.

        Args:
            name: Of the check.
            look: Gives the finding and what was found; what it raises is the finding otherwise.
        """
        try:
            finding, found = look()
        except HeadraceError as error:
            self.checks.append(Check(name=name, is_ok=False, finding=error.message))
            return None
        self.checks.append(Check(name=name, is_ok=True, finding=finding))
        return found


def diagnose(target_dir: Path, draft_dir: Path | None, *, budget_bytes: int) -> Diagnosis:
    """Look at everything that serving needs; what depends on a failed check is left out.

    Args:
        target_dir: Model directory.
        draft_dir: Model directory, or None for plain decoding.
        budget_bytes: For all processes.
    """
    diagnosis = Diagnosis()
    target = diagnosis.note("target", lambda: _model(target_dir))
    if draft_dir is not None:
        diagnosis.note("draft", lambda: _draft(draft_dir, target_dir))
    if target is None:
        return diagnosis
    diagnosis.drive = diagnosis.note("drive", lambda: _drive(target))
    if not diagnosis.is_ok:
        return diagnosis
    envelope = diagnosis.note("memory", lambda: _memory(target_dir, draft_dir, budget_bytes))
    if envelope is not None:
        diagnosis.note("shared memory", lambda: _shared_memory(envelope))
    if envelope is not None and diagnosis.drive is not None:
        diagnosis.prediction = _predict(target, envelope, diagnosis.drive)
    return diagnosis


def _model(directory: Path) -> tuple[str, Decoder]:
    decoder = Decoder(Checkpoint.open(directory))
    kind = decoder.unbound.config.model_type
    return f"{kind}, {format_bytes(decoder.checkpoint.num_bytes)}", decoder


def _draft(directory: Path, target_dir: Path) -> tuple[str, Decoder]:
    finding, decoder = _model(directory)
    if load_vocabulary(directory).fingerprint != load_vocabulary(target_dir).fingerprint:
        raise ConfigError("it has another vocabulary than the target: choose one of its family")
    return finding, decoder


def _drive(target: Decoder) -> tuple[str, DriveRate]:
    rate = measure_drive(target.checkpoint.files, duration_s=_DRIVE_S)
    how = "" if rate.is_direct else ", through the page cache: its file system has no direct reads"
    return f"{rate.gb_per_s:.2f} GB/s{how}", rate


def _memory(target_dir: Path, draft_dir: Path | None, budget_bytes: int) -> tuple[str, Envelope]:
    envelope = partition(target_dir, draft_dir, budget_bytes, "auto")
    available_bytes = psutil.virtual_memory().available
    if envelope.total_bytes > available_bytes:
        raise ConfigError(
            f"{format_bytes(available_bytes)} are free and {format_bytes(envelope.total_bytes)} "
            f"would be taken: give a --budget of at most {available_bytes >> 20}M"
        )
    streamed = (
        f"{format_bytes(envelope.plan.streamed_bytes)} of weights are streamed"
        if envelope.is_streamed
        else "all weights stay in it"
    )
    return f"{format_bytes(envelope.total_bytes)} are used; {streamed}", envelope


def _shared_memory(envelope: Envelope) -> tuple[str, None]:
    directory = Path(os.environ.get("HEADRACE_SHM_DIR") or _SHARED_MEMORY)
    if not directory.is_dir():
        raise ConfigError(f"there is no {directory}: set HEADRACE_SHM_DIR to a memory file system")
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < envelope.slots_total_bytes:
        raise ConfigError(
            f"{directory} has {format_bytes(free_bytes)} free and the slots need "
            f"{format_bytes(envelope.slots_total_bytes)}: enlarge it (in a container, --shm-size) "
            "or give a smaller --budget"
        )
    return f"{format_bytes(free_bytes)} free in {directory}", None


def _predict(target: Decoder, envelope: Envelope, drive: DriveRate) -> Prediction:
    dtype = target.unbound.dtype
    return predict(
        streamed_bytes=envelope.plan.streamed_bytes if envelope.is_streamed else 0,
        weight_bytes=target.weight_bytes,
        drive_gb_per_s=drive.gb_per_s,
        compute_gb_per_s=weights_gb_per_s(dtype, num_tokens=1),
        compute_gb_per_s_16=weights_gb_per_s(dtype, num_tokens=_NUM_REQUESTS),
    )


def predict(
    *,
    streamed_bytes: int,
    weight_bytes: int,
    drive_gb_per_s: float,
    compute_gb_per_s: float,
    compute_gb_per_s_16: float,
) -> Prediction:
    """What to expect of sweeps that read and compute at the same time: the slower of both counts.

    Args:
        streamed_bytes: Read by each sweep.
        weight_bytes: Computed with by each sweep.
        drive_gb_per_s: Of reads.
        compute_gb_per_s: Weights that are computed with, with one token in the sweep.
        compute_gb_per_s_16: The same with 16 tokens.
    """
    drive_s = streamed_bytes / drive_gb_per_s / 1e9
    compute_s = weight_bytes / compute_gb_per_s / 1e9
    seconds_per_sweep = max(drive_s, compute_s)
    seconds_per_sweep_16 = max(drive_s, weight_bytes / compute_gb_per_s_16 / 1e9)
    return Prediction(
        seconds_per_sweep=seconds_per_sweep,
        tokens_per_s=1 / seconds_per_sweep,
        tokens_per_s_16=_NUM_REQUESTS / seconds_per_sweep_16,
        limited_by="drive" if drive_s > compute_s else "processor",
    )
