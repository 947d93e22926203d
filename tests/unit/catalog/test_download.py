"""A fetched file is whole and right, or it is not there."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.catalog.download import MAX_ATTEMPTS, RemoteFile, download
from headrace.errors import ConfigError
from tests.support.range_server import RangeServer, range_server

CONTENT = bytes(range(256)) * 1000
FILE = RemoteFile(
    name="file.whl", num_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with range_server(CONTENT) as running:
        yield running


def fetch(url: str, directory: Path) -> Path:
    return download(FILE, url, directory, on_progress=lambda *_: None, retry_wait_s=0.0)


def test_a_cut_transfer_goes_on_where_it_stopped(server: RangeServer, tmp_path: Path) -> None:
    server.cut_after_bytes = 100_000
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT
    assert server.ranges[0] == "bytes=0-"
    first = int(server.ranges[1].removeprefix("bytes=").rstrip("-"))
    assert 0 < first <= 100_000


def test_a_later_run_goes_on_from_the_part_file(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "file.whl.part").write_bytes(CONTENT[:77_777])
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=77777-"]


def test_a_server_without_ranges_sends_all_of_it_again(server: RangeServer, tmp_path: Path) -> None:
    server.honours_range = False
    (tmp_path / "file.whl.part").write_bytes(b"x" * 500)
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT


def test_a_wrong_content_is_deleted_and_named(server: RangeServer, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + b"!"
    with pytest.raises(ConfigError, match=r"file\.whl is not the expected file"):
        fetch(server.url, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_file_is_not_accepted(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "file.whl.part").write_bytes(b"x" * 1000)
    with pytest.raises(ConfigError, match="deleted"):
        fetch(server.url, tmp_path)
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT


def test_a_complete_file_is_not_fetched_again(server: RangeServer, tmp_path: Path) -> None:
    fetch(server.url, tmp_path)
    fetch(server.url, tmp_path)
    assert len(server.ranges) == 1


def test_an_unreachable_server_is_a_clear_error(tmp_path: Path) -> None:
    with range_server(CONTENT) as server:
        url = server.url
    with pytest.raises(ConfigError, match="run the command again"):
        fetch(url, tmp_path)


def test_a_file_url_is_copied_and_verified(tmp_path: Path) -> None:
    source = tmp_path / "source.whl"
    source.write_bytes(CONTENT)
    directory = tmp_path / "cache"
    directory.mkdir()
    assert fetch(source.as_uri(), directory).read_bytes() == CONTENT


def test_progress_ends_at_the_full_size(server: RangeServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    download(FILE, server.url, tmp_path, on_progress=lambda *pair: seen.append(pair))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


def test_a_server_that_always_cuts_is_given_up(tmp_path: Path) -> None:
    with range_server(CONTENT[:1000]) as server:
        server.honours_range = False  # it starts again each time and never gets to the end
        with pytest.raises(ConfigError):
            fetch(server.url, tmp_path)
        assert len(server.ranges) <= MAX_ATTEMPTS
