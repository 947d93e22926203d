"""Shows a fetch: a bar with rate and time left on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from headrace.catalog.demo import Reporter

_PLAIN_STEPS = 10


@contextmanager
def fetch_reporter() -> Iterator[Reporter]:
    """A reporter that writes to stderr, and shows nothing when nothing is fetched."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Reporter(say=console.print, progress=_PlainProgress(console).show)
        return
    bar = Progress(
        TextColumn("downloading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", visible=False, total=None)
        yield Reporter(
            say=console.print,
            progress=lambda done, total: bar.update(
                task, completed=done, total=total, visible=done < total
            ),
        )


class _PlainProgress:
    """A line for every tenth of the download."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def show(self, num_bytes: int, total_bytes: int) -> None:
        """Print when another tenth is complete."""
        step = num_bytes * _PLAIN_STEPS // total_bytes
        if step > self._shown:
            self._shown = step
            self._console.print(f"downloaded {num_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
