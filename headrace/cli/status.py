"""What the user sees of a stack: each process's state, memory and the measured stream rate."""

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.cli.readiness import Readiness

_RATE_WINDOW = 6
"""Samples that a rate spans: short sweeps and the pauses between them even out."""
_PLAIN_INTERVAL_S = 10.0
_MIN_SHOWN_GB_PER_S = 0.01
_STOPPING = "live requests may finish first; Ctrl-C again ends them"
_STYLES = {Readiness.READY: "green", Readiness.LOADING: "yellow", Readiness.STARTING: "dim"}


@dataclass(slots=True, kw_only=True)
class ProcessStatus:
    """One process as last seen."""

    started_at_s: float
    """On the monotonic clock."""
    readiness: Readiness = Readiness.STARTING
    ready_after_s: float | None = None
    memory_bytes: int = 0
    """Resident set."""


@dataclass(slots=True, kw_only=True)
class StackStatus:
    """All processes, in start order, and where they are reached."""

    endpoints: str
    """One line for the user: addresses and where the logs are."""
    processes: dict[str, ProcessStatus] = field(default_factory=dict)
    is_serving: bool = False
    is_stopping: bool = False
    gb_per_s: float | None = None
    """Read from storage over the last seconds; None while weights are not streamed."""


class RateMeter:
    """A counter's rate over its last few samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)

    def add(self, now_s: float, num_bytes: int) -> float:
        """Take a sample of the counter; returns GB/s over the window, 0 until there are two."""
        self._samples.append((now_s, num_bytes))
        first_s, first_bytes = self._samples[0]
        return (num_bytes - first_bytes) / (now_s - first_s) / 1e9 if now_s > first_s else 0.0


class Display(Protocol):
    """Something that shows a status whenever it changed."""

    def show(self, status: StackStatus) -> None:
        """Show it now."""
        ...

    def close(self) -> None:
        """Show nothing from now on."""
        ...


def open_display(stream: TextIO = sys.stderr) -> Display:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveDisplay(Console(file=stream)) if stream.isatty() else PlainDisplay(stream)


class LiveDisplay:
    """A table that is redrawn in place and disappears when closed."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, transient=True, refresh_per_second=4)
        self._live.start()

    def show(self, status: StackStatus) -> None:
        """Redraw."""
        self._live.update(_table(status))

    def close(self) -> None:
        """Remove the table."""
        self._live.stop()


class PlainDisplay:
    """One line for each change of state, and the stream rate every ten seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._shown: dict[str, Readiness] = {}
        self._is_serving = False
        self._next_line_at_s = 0.0

    def show(self, status: StackStatus) -> None:
        """Print what changed."""
        for name, process in status.processes.items():
            if self._shown.get(name) != process.readiness:
                self._shown[name] = process.readiness
                self._print(f"{name}: {_describe(process)}")
        if status.is_serving and not self._is_serving:
            self._is_serving = True
            self._print(f"serving: {status.endpoints}")
        if status.is_stopping:
            self._print(f"stopping: {_STOPPING}")
        else:
            self._show_progress(status)

    def close(self) -> None:
        """Print nothing more."""
        self._stream = None

    def _show_progress(self, status: StackStatus) -> None:
        now_s = time.monotonic()
        if now_s < self._next_line_at_s:
            return
        self._next_line_at_s = now_s + _PLAIN_INTERVAL_S
        for name, process in status.processes.items():
            if process.readiness is Readiness.LOADING:
                self._print(f"{name}: {_describe(process)}")
        if status.gb_per_s and status.gb_per_s >= _MIN_SHOWN_GB_PER_S:
            self._print(f"streaming: {status.gb_per_s:.2f} GB/s")

    def _print(self, line: str) -> None:
        if self._stream is not None:
            print(line, file=self._stream, flush=True)


def _table(status: StackStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, process in status.processes.items():
        style = _STYLES[process.readiness]
        table.add_row(name, f"[{style}]{_describe(process)}[/]")
    if status.gb_per_s is not None:
        table.add_row("stream", f"{status.gb_per_s:.2f} GB/s")
    if status.is_serving:
        table.add_row("serving", status.endpoints)
    if status.is_stopping:
        table.add_row("stopping", _STOPPING)
    return table


def _describe(process: ProcessStatus) -> str:
    parts: list[str] = [process.readiness]
    if process.readiness is Readiness.READY:
        parts.append(f"after {process.ready_after_s or 0:.1f} s")
    else:
        parts.append(f"for {time.monotonic() - process.started_at_s:.0f} s")
    if process.memory_bytes:
        parts.append(f"{process.memory_bytes / 1e9:.2f} GB in memory")
    return ", ".join(parts)
