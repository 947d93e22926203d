"""`headrace bench` on a small model: every process real, figures checked against each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.fio import require_fio
from headrace.catalog.widen import widen
from headrace.errors import ConfigError
from headrace.model.checkpoint import Checkpoint
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_MEMORY = "1500M"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 32 MB."""
    directory = tmp_path_factory.mktemp("models")
    small = make_tiny_model(directory / "small")
    widen(small, directory / "large", num_bytes=32_000_000)
    return directory / "large"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # All of it streamed: such a model would fit the memory.
    settings = {"HEADRACE_RESIDENT_BYTES": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli", *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def test_bench_stream_prints_what_the_disk_and_the_sweeps_do(target: Path) -> None:
    try:
        require_fio()
    except ConfigError as error:
        pytest.skip(error.message)
    result = _run(
        *("bench", "stream", "--target", str(target), "--rounds", "1", "--memory", _MEMORY),
        "--json",
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    model_bytes = Checkpoint.open(target).num_bytes
    assert report["model_bytes"] == model_bytes
    assert report["memory_cap_bytes"] in (1500 << 20, None)
    assert set(report["peak_rss_bytes"]) == {"streamer", "target"}
    assert all(0 < rss < 1500 << 20 for rss in report["peak_rss_bytes"].values())
    assert [sweep["tokens"] for sweep in report["sweeps"]] == [1, 8, 16, 32, 64]
    # One round: its ratio is that of its figures, and five kinds of sweep read the model each.
    assert report["ratio"] == pytest.approx(
        report["stream_gb_per_s"] / report["disk_gb_per_s"], abs=0.01
    )
    seconds = sum(sweep["seconds"] for sweep in report["sweeps"])
    assert report["stream_gb_per_s"] == pytest.approx(5 * model_bytes / seconds / 1e9, rel=0.3)
    assert 0 <= report["disk_idle_share"] <= 1


def test_a_memory_that_is_too_small_is_refused_before_anything_starts(target: Path) -> None:
    result = _run("bench", "stream", "--target", str(target), "--memory", "1M", "--rounds", "1")
    assert result.returncode == 1
    assert "too small for this model" in result.stderr
