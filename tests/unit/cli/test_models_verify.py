"""`headrace models verify` from the outside."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.app import app
from headrace.model.manifest import FILE_NAME
from tests.support.checkpoints import write_single
from tests.support.damage import flip_bit

NAME = "model.layers.0.a.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_single(tmp_path / "model", {NAME: bytes(range(100))})


def verify(model: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["models", "verify", str(model), *options])


def test_the_first_run_writes_the_manifest_and_the_second_compares(model: Path) -> None:
    first, second = verify(model), verify(model)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == f"wrote {FILE_NAME}: 1 tensors in 1 files, 100 B\n"
    assert second.stdout == f"all as in {FILE_NAME}: 1 tensors in 1 files, 100 B\n"
    assert "verified 0 of 0 MB" in second.stderr


def test_a_difference_is_named_and_exit_code_1(model: Path) -> None:
    verify(model)
    flip_bit(model, NAME, 50)
    result = verify(model)
    assert result.exit_code == 1
    assert result.stdout == f"tensor {NAME} in model.safetensors has other content\n"
    assert f"not what {FILE_NAME} says" in result.stderr
    assert "--update" in result.stderr


def test_update_takes_the_files_as_they_are(model: Path) -> None:
    verify(model)
    flip_bit(model, NAME, 50)
    assert verify(model, "--update").exit_code == 0
    assert verify(model).exit_code == 0


def test_a_damaged_manifest_is_an_error_and_update_replaces_it(model: Path) -> None:
    (model / FILE_NAME).write_text("{}")
    result = verify(model)
    assert result.exit_code == 1
    assert f"{FILE_NAME} is damaged" in result.stderr
    assert verify(model, "--update").exit_code == 0


def test_a_truncated_file_is_named(model: Path) -> None:
    verify(model)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    result = verify(model)
    assert result.exit_code == 1
    assert "model.safetensors has " in result.stdout
