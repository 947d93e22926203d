"""From what the user calls a model to its directory."""

import re
from collections.abc import Callable
from pathlib import Path

from headrace.catalog.cache import cache_dir
from headrace.catalog.demo import DEMO, Reporter, demo_pair, fetch_demo
from headrace.errors import ConfigError

NO_DRAFT = "none"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "vocab*", "merges*"]
_HUB_IGNORED = ["original/*", "consolidated*"]
"""Second copies of the weights in other layouts."""


def resolve_target(name: str, reporter: Reporter) -> Path:
    """The directory of a target.

    Args:
        name: "demo" (fetched when absent), a local directory or a hub id.
        reporter: Hears of a fetch.

    Raises:
        ConfigError: There is no such model, or it is in a form that cannot be served.
    """
    if name == DEMO:
        return fetch_demo(cache_dir(), reporter).target
    return _resolve_other(name, reporter.say)


def resolve_draft(name: str | None, target: str, reporter: Reporter) -> Path | None:
    """The directory of a draft, or None for plain decoding.

    Args:
        name: "demo", a local directory, a hub id, or "none"; None chooses the demo's draft for the
            demo target and no draft for any other.
        target: The target's name, as the user gave it.
        reporter: Hears of a fetch and of plain decoding.

    Raises:
        ConfigError: There is no such model, or it is in a form that cannot be served.
    """
    if name is None:
        name = DEMO if target == DEMO else NO_DRAFT
        if name == NO_DRAFT:
            reporter.say("no draft given: plain decoding, one token a sweep (see --draft)")
    if name == NO_DRAFT:
        return None
    if name == DEMO:
        return fetch_demo(cache_dir(), reporter).draft
    return _resolve_other(name, reporter.say)


def model_path(name: str) -> Path:
    """The directory of a model that is on this machine already; fetches nothing.

    Args:
        name: "demo", "demo-draft" or a local directory.

    Raises:
        ConfigError: It is not here.
    """
    pair = demo_pair(cache_dir())
    paths = {DEMO: pair.target, f"{DEMO}-draft": pair.draft}
    if name in paths and not pair.is_complete:
        raise ConfigError("the demo is not fetched yet: run `headrace models fetch demo`")
    return paths.get(name) or _check_directory(Path(name).expanduser().absolute())


def _resolve_other(name: str, say: Callable[[str], None]) -> Path:
    path = Path(name).expanduser().absolute()
    if path.exists():
        return _check_directory(path)
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"there is no directory {name}: give a Hugging Face model directory, a hub id "
            "(OWNER/NAME) or demo"
        )
    say(f"fetching {name} from the hub")
    return _check_directory(_fetch_from_hub(name))


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
        )
    except (HFValidationError, OSError) as error:  # every answer and failure of the hub is one
        raise ConfigError(
            f"{name} is neither a local directory nor could it be fetched from the hub "
            f"({type(error).__name__}): check the name and the network, or give a directory"
        ) from None


def _check_directory(path: Path) -> Path:
    """Refuse at once what no process could serve; the streamer checks the weights themselves."""
    if path.is_file():
        raise ConfigError(f"{path.name} is a file: give the model directory, with safetensors")
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}: give a Hugging Face model directory")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json: give a Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"{path} has no *.safetensors: only safetensors are read, so save the model with "
            "save_pretrained(..., safe_serialization=True) first"
        )
    return path
