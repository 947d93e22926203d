"""Shows what takes long: a bar with rate and time left on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

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


def fetch_reporter() -> AbstractContextManager[Reporter]:
    """A reporter that writes to stderr, and shows nothing when nothing is fetched."""
    return _reporter("downloading", "downloaded")


def verify_reporter() -> AbstractContextManager[Reporter]:
    """The same for files that are read and hashed."""
    return _reporter("verifying", "verified")


@contextmanager
def _reporter(doing: str, done: str) -> Iterator[Reporter]:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Reporter(say=console.print, progress=_PlainProgress(console, done).show)
        return
    bar = Progress(
        TextColumn(doing),
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
    """A line for every tenth of the bytes."""

    def __init__(self, console: Console, done: str) -> None:
        self._console = console
        self._done = done
        self._shown = 0

    def show(self, num_bytes: int, total_bytes: int) -> None:
        """Print when another tenth is complete."""
        step = num_bytes * _PLAIN_STEPS // total_bytes
        if step > self._shown:
            self._shown = step
            self._console.print(f"{self._done} {num_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB")
