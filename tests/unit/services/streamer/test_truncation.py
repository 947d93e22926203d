from pathlib import Path

import pytest

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint
from services.streamer.reader import Reader
from tests.support.tiny_models import make_tiny_model


def test_a_file_cut_short_after_its_header_was_read_never_becomes_zeros(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny_model(tmp_path))
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    reader = Reader([path])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors ends before tensor"):
        reader.require(checkpoint.tensors.values())
