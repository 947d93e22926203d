"""Starts the processes that are measured, and tells how much memory they took."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.cli.child import Child
from headrace.cli.readiness import Readiness
from headrace.cli.wiring import ProcessSpec
from headrace.errors import HeadraceError, PeerUnavailable

_POLL_INTERVAL_S = 0.1
_REAP_S = 1.0
"""How much later than its broken connections the end of a process may show."""


@asynccontextmanager
async def started(specs: Sequence[ProcessSpec], run_dir: Path) -> AsyncIterator[list[Child]]:
    """Processes that serve, started one after the other and stopped at the end.

    Raises:
        PeerUnavailable: One of them ended by itself; the message has its last lines.
    """
    children: list[Child] = []
    try:
        for spec in specs:
            children.append(await Child.start(spec, run_dir))
            await _until_ready(children[-1])
        yield children
    except HeadraceError:
        await asyncio.wait(
            [asyncio.ensure_future(child.wait()) for child in children], timeout=_REAP_S
        )
        for child in children:
            _require_running(child)  # a lost process explains the failed calls to it
        raise
    finally:
        for child in reversed(children):
            await child.stop(child.spec.stop_grace_s, is_hurried=True)


def peak_rss_bytes(child: Child) -> int:
    """The most memory that a running process had resident at once, shared memory included."""
    status = Path(f"/proc/{child.pid}/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(kib) * 1024


async def _until_ready(child: Child) -> None:
    while await child.spec.probe.check() is not Readiness.READY:
        _require_running(child)
        await asyncio.sleep(_POLL_INTERVAL_S)


def _require_running(child: Child) -> None:
    if not child.is_running:
        raise PeerUnavailable(child.last_words())
