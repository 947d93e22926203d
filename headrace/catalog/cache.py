"""The directory that fetched models live in. What has its final name there is complete."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ConfigError


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """$HEADRACE_CACHE_DIR, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    own = environ.get("HEADRACE_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "headrace"


@contextmanager
def exclusive(cache: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the cache for one writer; others wait for it.

    Args:
        cache: The cache directory; made when absent.
        on_wait: Called once when another process holds it.

    Raises:
        ConfigError: The directory cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {cache} ({error.strerror}): set HEADRACE_CACHE_DIR"
        ) from None
    with lock:  # closing it releases the lock, also when the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def require_space(cache: Path, num_bytes: int) -> None:
    """Raise ConfigError unless the cache's file system has num_bytes free."""
    free = shutil.disk_usage(cache).free
    if free < num_bytes:
        raise ConfigError(
            f"{num_bytes / 1e9:.2f} GB are needed in {cache} and {free / 1e9:.2f} GB are free: "
            "free some, or set HEADRACE_CACHE_DIR to a larger disk"
        )


@contextmanager
def complete_directory(final: Path) -> Iterator[Path]:
    """A directory to write into, which takes its final name only when the block succeeds.

    The caller holds `exclusive`, so a leftover of the same name is an interrupted run's.

    Raises:
        ConfigError: The disk is full or refuses a write.
    """
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            _sync(path)
        partial.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write {final.name} to the cache ({error.strerror}): nothing of it is kept"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Bring a file or directory to the disk, so that a power cut after the rename loses nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
