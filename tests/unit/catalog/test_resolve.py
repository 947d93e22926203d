"""A model's name becomes a directory, or an error that says what to do."""

from pathlib import Path

import pytest

from headrace.catalog.demo import Reporter, demo_pair, fetch_demo
from headrace.catalog.resolve import model_path, resolve_draft, resolve_target
from headrace.errors import ConfigError

SILENT = Reporter(say=lambda _: None, progress=lambda *_: None)


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def make_demo(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(cache))
    make_model(demo_pair(cache).target)
    make_model(demo_pair(cache).draft)


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    assert resolve_target(str(model), SILENT) == model


def test_a_relative_directory_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_target("model", SILENT) == model


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent/model", "a/b/c"])
def test_a_missing_directory_is_an_error_that_says_what_to_give(name: str) -> None:
    with pytest.raises(ConfigError, match="hub id"):
        resolve_target(name, SILENT)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_target(str(tmp_path), SILENT)


def test_a_directory_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors are read"):
        resolve_target(str(model), SILENT)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_target(str(path), SILENT)


def test_an_unreachable_hub_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither a local directory nor"):
        resolve_target("nobody/nothing", SILENT)


def test_the_demo_target_brings_the_demo_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_demo(tmp_path, monkeypatch)
    assert resolve_target("demo", SILENT) == demo_pair(tmp_path).target
    assert resolve_draft(None, "demo", SILENT) == demo_pair(tmp_path).draft


def test_another_target_without_a_draft_decodes_plainly_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    reporter = Reporter(say=said.append, progress=lambda *_: None)
    assert resolve_draft(None, str(tmp_path), reporter) is None
    assert "plain decoding" in said[0]


def test_none_turns_the_draft_off_silently() -> None:
    said: list[str] = []
    reporter = Reporter(say=said.append, progress=lambda *_: None)
    assert resolve_draft("none", "demo", reporter) is None
    assert said == []


def test_a_complete_pair_is_not_touched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_demo(tmp_path, monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    assert fetch_demo(tmp_path, SILENT) == demo_pair(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_path_of_an_absent_demo_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="headrace models fetch demo"):
        model_path("demo")
