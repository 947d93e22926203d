"""A peer's virtual environment: made on demand, kept for the next run."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from headrace.errors import PeerUnavailable

_INSTALL_TIMEOUT_S = 3600.0
"""llama.cpp is compiled from its source."""
_NUM_LAST_LINES = 8
_BUILD_SETTINGS = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
}


def same_torch() -> str:
    """The requirement for our own torch, so that a peer gets the same build of it."""
    return f"torch=={version('torch').partition('+')[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEnvironment:
    """A directory with a Python of its own."""

    directory: Path
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    async def prepare(self) -> None:
        """Make it, unless it is complete.

        Raises:
            PeerUnavailable: pip cannot; the message has its last lines.
        """
        complete = self.directory / ".complete"
        wanted = "\n".join(self.requirements)
        if complete.is_file() and complete.read_text() == wanted:
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            await output_of([sys.executable, "-m", "venv", str(self.directory)])
        await output_of(
            [str(self.python), "-m", "pip", "install", "--quiet", *self.requirements],
            environment=_BUILD_SETTINGS,
            timeout_s=_INSTALL_TIMEOUT_S,
        )
        complete.write_text(wanted)

    async def version_of(self, package: str) -> str:
        """Of an installed package."""
        program = f"from importlib.metadata import version; print(version({package!r}))"
        return (await output_of([str(self.python), "-c", program])).strip()


async def output_of(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """What a command prints on stdout; it is killed when this is cancelled.

    Args:
        command: Program and arguments.
        environment: Set beside the user's own.
        timeout_s: For all of it.

    Raises:
        PeerUnavailable: It failed or took too long; the message has its last lines.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, log = await process.communicate()
    except TimeoutError:
        raise PeerUnavailable(f"{_name(command)} took longer than {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = log.decode(errors="replace").strip().splitlines()[-_NUM_LAST_LINES:]
        raise PeerUnavailable(
            f"{_name(command)} ended with {process.returncode}: " + "\n".join(lines)
        )
    return output.decode(errors="replace")


def _name(command: Sequence[str]) -> str:
    return " ".join(Path(part).name for part in command[:4])
