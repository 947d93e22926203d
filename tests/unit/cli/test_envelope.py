"""`headrace envelope` from the outside."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from tests.support.tiny_models import make_tiny_model

MIB = 1 << 20
runner = CliRunner()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 960 Ki matrix elements and a head of 68 Ki, in float32."""
    directory = tmp_path_factory.mktemp("target")
    return make_tiny_model(directory, hidden_size=256, intermediate_size=1024, head_dim=64)


def envelope(target: Path | str, *options: str) -> dict[str, Any]:
    result = runner.invoke(app, ["envelope", "--target", str(target), "--json", *options])
    assert result.exit_code == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def refusal(target: Path | str, *options: str) -> str:
    result = runner.invoke(app, ["envelope", "--target", str(target), *options])
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_it_prints_one_object_whose_parts_fit_the_budget(target: Path) -> None:
    parts = envelope(target, "--budget", "600M", "--weights", "streamed")
    assert parts["is_streamed"]
    names = ("slots", "resident", "kv", "workspace", "draft", "base")
    assert sum(parts[f"{name}_bytes"] for name in names) == parts["total_bytes"] <= 600 * MIB
    assert parts["target_process_bytes"] + parts["streamer_process_bytes"] == parts["total_bytes"]


def test_what_is_streamed_and_what_stays_is_the_whole_model_but_its_embedding(
    target: Path,
) -> None:
    parts = envelope(target, "--budget", "600M", "--weights", "streamed")
    weights = (target / "model.safetensors").stat().st_size
    embedding = 4 * 272 * 256
    header = 8 + int.from_bytes((target / "model.safetensors").read_bytes()[:8], "little")
    assert parts["streamed_bytes"] + parts["resident_bytes"] == weights - embedding - header


def test_a_model_that_fits_is_not_streamed(target: Path) -> None:
    parts = envelope(target, "--budget", "1G")
    assert not parts["is_streamed"]
    assert (parts["num_slots"], parts["streamer_process_bytes"]) == (0, 0)
    assert parts["total_bytes"] == parts["target_process_bytes"] <= 1024 * MIB


def test_a_draft_is_part_of_the_budget(target: Path) -> None:
    without = envelope(target, "--budget", "2G")
    parts = envelope(target, "--budget", "2G", "--draft", str(target))
    assert without["draft_bytes"] == 0
    assert parts["draft_bytes"] > 440 * MIB
    assert parts["total_bytes"] <= 2048 * MIB


def test_a_budget_that_is_too_small_is_refused_with_one_that_works(target: Path) -> None:
    line = refusal(target, "--budget", "100M")
    assert line.startswith("headrace: a budget of 100 MiB is too small for this model")
    smallest = line.rsplit(" ", 1)[-1]
    assert envelope(target, "--budget", smallest)["total_bytes"] > 440 * MIB
    less = f"{int(smallest.removesuffix('M')) - 1}M"
    assert refusal(target, "--budget", less).endswith(f"give at least {smallest}")


@pytest.mark.parametrize("budget", ["lots", "0", "-1G", ""])
def test_a_budget_that_is_no_size_is_refused_before_a_model_is_looked_for(budget: str) -> None:
    assert "give something like 6.8G" in refusal("./absent", "--budget", budget)


def test_a_directory_that_is_not_there_is_refused() -> None:
    assert "there is no directory" in refusal("./absent", "--budget", "1G")


def test_a_way_to_treat_weights_that_does_not_exist_is_wrong_usage(target: Path) -> None:
    result = runner.invoke(app, ["envelope", "--target", str(target), "--weights", "half"])
    assert result.exit_code == 2
    assert all(choice in result.stderr for choice in ("auto", "streamed", "resident"))


def test_people_read_each_part_with_its_size_and_what_a_sweep_costs(target: Path) -> None:
    options = ["--budget", "600M", "--weights", "streamed"]
    result = runner.invoke(app, ["envelope", "--target", str(target), *options])
    assert result.exit_code == 0
    parts = [line.split("  ")[0].strip() for line in result.stdout.splitlines()]
    for part in ("target process", "streamer process", "total"):
        assert part in parts
    assert "draft process" not in parts
    assert "of 600 MiB" in result.stdout
    assert "Every sweep reads 15.27 MiB in one unit" in result.stdout


def test_people_are_told_that_a_model_fits(target: Path) -> None:
    result = runner.invoke(app, ["envelope", "--target", str(target), "--budget", "1G"])
    assert "The model fits" in result.stdout
    assert "streamer process" not in result.stdout
