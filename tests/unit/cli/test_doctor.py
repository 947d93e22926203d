"""`headrace doctor` says whether it will work, and what to do where it will not."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from tests.support.tiny_models import make_tiny_model

runner = CliRunner()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("doctor") / "target")


def _report(*arguments: str) -> dict[str, Any]:
    """The report; checks that the exit code tells whether all is well."""
    result = runner.invoke(app, ["doctor", "--draft", "none", "--json", *arguments])
    report: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == (0 if report["is_ok"] else 1)
    return report


def _findings(report: dict[str, Any]) -> dict[str, str]:
    """Of the failed checks, by name."""
    return {check["name"]: check["finding"] for check in report["checks"] if not check["is_ok"]}


def test_a_model_that_can_be_served_gets_a_prediction(target: Path) -> None:
    report = _report("--target", str(target), "--budget", "2G")
    assert report["is_ok"]
    assert [check["name"] for check in report["checks"]] == [
        "target",
        "drive",
        "memory",
        "shared memory",
    ]
    assert report["drive_gb_per_s"] > 0
    assert report["seconds_per_sweep"] > 0
    assert report["tokens_per_s_16"] > report["tokens_per_s"] > 0
    assert report["limited_by"] == "processor"  # it fits the memory


def test_an_unsupported_architecture_is_named(target: Path, tmp_path: Path) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    report = _report("--target", str(tmp_path))
    assert not report["is_ok"]
    assert "mamba" in _findings(report)["target"]
    assert report["tokens_per_s"] is None


def test_a_truncated_file_is_named(target: Path, tmp_path: Path) -> None:
    for file in target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with (tmp_path / "model.safetensors").open("r+b") as weights:
        weights.truncate(100_000)
    report = _report("--target", str(tmp_path))
    assert "model.safetensors is truncated" in _findings(report)["target"]


def test_a_budget_that_cannot_work_is_told_the_least_that_does(target: Path) -> None:
    report = _report("--target", str(target), "--budget", "100M")
    assert "give at least" in _findings(report)["memory"]


def test_a_budget_above_the_free_memory_takes_what_the_model_needs(target: Path) -> None:
    report = _report("--target", str(target), "--budget", "1000T")
    assert report["is_ok"]  # a tiny model takes no more than it needs


def test_absent_shared_memory_is_said(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SHM_DIR", "/absent")
    report = _report("--target", str(target), "--budget", "2G")
    assert "set HEADRACE_SHM_DIR" in _findings(report)["shared memory"]


def test_a_draft_with_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", num_layers=1)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    report = _report("--target", str(target), "--draft", str(draft))
    assert "another vocabulary" in _findings(report)["draft"]


def test_the_plain_report_ends_with_what_to_expect(target: Path) -> None:
    result = runner.invoke(app, ["doctor", "--draft", "none", "--target", str(target)])
    assert result.exit_code == 0
    assert result.stdout.startswith("ok      target")
    assert "the processor is the limit" in result.stdout.splitlines()[-1]
