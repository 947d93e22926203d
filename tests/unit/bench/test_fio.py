"""fio tells what the disk does, or what to do so that it can."""

import os
from pathlib import Path

import pytest

from headrace.bench import fio
from headrace.errors import ConfigError


def test_without_fio_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install fio"):
        fio.require_fio()


def test_the_best_pattern_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for fio: reports as many bytes a millisecond as reads in flight, times a million.
    program = tmp_path / "fio"
    program.write_text(
        "#!/bin/sh\n"
        'for a in "$@"; do case $a in --iodepth=*) depth=${a#*=};; esac; done\n'
        'echo "{\\"jobs\\": [{\\"read\\": {\\"io_bytes\\": ${depth}000000, \\"runtime\\": 1}}]}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    deepest = max(pattern.depth for pattern in fio.PATTERNS)
    assert fio.disk_gb_per_s(tmp_path / "model") == deepest


def test_a_file_that_fio_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho 'direct reads refused' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"model directly.*direct reads refused"):
        fio.disk_gb_per_s(tmp_path / "model")


@pytest.mark.slow
def test_fio_measures_a_real_file(tmp_path: Path) -> None:
    try:
        fio.require_fio()
    except ConfigError as error:
        pytest.skip(error.message)
    file = tmp_path / "weights: and more"
    file.write_bytes(os.urandom(16 << 20))
    assert fio.disk_gb_per_s(file) > 0
