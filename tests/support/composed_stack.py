"""The system in containers, under a project name of its own beside the user's."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PROJECT = "headrace-test"


class ComposedStack:
    """Containers, networks and volumes of one docker compose project."""

    base_url = "http://127.0.0.1:8001"

    def __init__(self, models_dir: Path) -> None:
        """Choose the models; `composed_stack` starts them.

        Args:
            models_dir: Holds the models that .env names.
        """
        self._environment = {**os.environ, "HEADRACE_MODELS_DIR": str(models_dir)}

    def compose(self, *arguments: str) -> list[str]:
        """The lines that one `docker compose` command prints on stdout."""
        return self._run("docker", "compose", "--project-name", _PROJECT, *arguments)

    def leftovers(self) -> list[str]:
        """Ids of what is left of the project in the engine."""
        label = f"label=com.docker.compose.project={_PROJECT}"
        return [
            line
            for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
            for line in self._run("docker", *kind, "--quiet", "--filter", label)
        ]

    def _run(self, *command: str) -> list[str]:
        result = subprocess.run(
            command, cwd=_ROOT, env=self._environment, capture_output=True, text=True
        )
        if result.returncode != 0:
            raise AssertionError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
        return result.stdout.splitlines()


@contextmanager
def composed_stack(models_dir: Path) -> Iterator[ComposedStack]:
    """Build and start everything; at the end remove all but the images."""
    stack = ComposedStack(models_dir)
    try:
        stack.compose("up", "--build", "--detach", "--wait")
        yield stack
    finally:
        stack.compose("down", "--volumes")
