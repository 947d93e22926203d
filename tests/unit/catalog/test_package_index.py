"""The user's own pip says where a wheel is."""

import zipfile
from pathlib import Path

import pytest

from headrace.catalog.package_index import wheel_url
from headrace.errors import ConfigError


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one wheel, and a pip that looks nowhere else."""
    with zipfile.ZipFile(tmp_path / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_the_url_is_where_pip_would_download_from(index: Path) -> None:
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    assert wheel_url("tiny-model==1.0") == wheel.as_uri()


@pytest.mark.usefixtures("index")
def test_a_wheel_that_pip_cannot_find_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"pip cannot find tiny-model==2\.0"):
        wheel_url("tiny-model==2.0")
