"""One process of the stack: started, watched by its log, stopped."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

from headrace.cli.wiring import ProcessSpec

_NUM_LAST_LINES = 12
_HURRY_AFTER_S = 0.5


class Child:
    """A running process in its own session, so that Ctrl-C reaches the launcher alone."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.started_at_s = time.monotonic()
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, spec: ProcessSpec, run_dir: Path) -> "Child":
        """Start a process whose output goes to NAME.log in run_dir."""
        log = run_dir / f"{spec.name}.log"
        tether = (sys.executable, "-m", "headrace.cli.tether", str(os.getpid()))
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *tether,
                *spec.command,
                cwd=run_dir,  # so that nothing in the user's directory shadows a module
                env=dict(spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(spec, process, log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._process.wait()

    def last_words(self) -> str:
        """How it ended, and the last lines of its log."""
        code = self._process.returncode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        with self._log.open(errors="replace") as log:
            lines = deque(log, maxlen=_NUM_LAST_LINES)
        tail = "".join(f"  {line.rstrip()}\n" for line in lines)
        return f"the {self.spec.name} ended {how}; its last lines:\n{tail or '  (none)'}".rstrip()

    async def stop(self, grace_s: float, *, is_hurried: bool = False) -> None:
        """Ask it to end, and kill it when it has not after grace_s.

        Args:
            grace_s: How long it may take.
            is_hurried: Ask twice: a process that drains ends what is live instead.
        """
        if self.is_running:
            self._process.terminate()
        if self.is_running and is_hurried:
            await asyncio.sleep(_HURRY_AFTER_S)  # two signals at once would be one
            if self.is_running:
                self._process.terminate()
        try:
            await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.is_running:
            self._process.kill()
