import re
from pathlib import Path

from headrace.cli.runtime_settings import RUNTIME_SETTINGS

_DOCKERFILE = Path(__file__).parents[3] / "deploy" / "Dockerfile"


def test_containers_are_told_the_same() -> None:
    in_images = dict(re.findall(r"([A-Z_]+)=(\S+)", _DOCKERFILE.read_text()))

    assert {name: in_images.get(name) for name in RUNTIME_SETTINGS} == RUNTIME_SETTINGS
