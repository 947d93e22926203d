"""What has its final name in the cache is complete."""

import threading
from pathlib import Path

import pytest

from headrace.catalog.cache import cache_dir, complete_directory, exclusive, require_space
from headrace.errors import ConfigError


def test_the_cache_follows_headrace_then_xdg_then_home() -> None:
    both = {"HEADRACE_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}
    assert cache_dir(both) == Path("/own")
    assert cache_dir({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/headrace")
    assert cache_dir({}) == Path.home() / ".cache" / "headrace"


def test_a_directory_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with complete_directory(final) as partial:
        (partial / "config.json").write_text("{}")
        assert not final.exists()
    assert (final / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [final]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with complete_directory(tmp_path / "model") as partial:
            (partial / "config.json").write_text("{")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_runs_leftover_is_never_used(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    with complete_directory(tmp_path / "model") as partial:
        assert list(partial.iterdir()) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="No space left"),
        complete_directory(tmp_path / "model"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_CACHE_DIR"):
        require_space(tmp_path, 10**18)


def test_a_second_writer_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    waiting = threading.Event()

    def second() -> None:
        with exclusive(tmp_path, on_wait=waiting.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path, on_wait=lambda: order.append("must not wait")):
        thread.start()
        assert waiting.wait(5.0)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_an_unwritable_cache_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="HEADRACE_CACHE_DIR"),
        exclusive(tmp_path / "file" / "cache", on_wait=lambda: None),
    ):
        pass
