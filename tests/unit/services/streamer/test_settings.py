"""What the streamer refuses to start with."""

from pathlib import Path

import pytest

from headrace.config import Environment
from headrace.errors import ConfigError
from services.streamer.__main__ import Config, main
from tests.support.checkpoints import write_config


def settings(directory: Path, **changes: str) -> Environment:
    values = {
        "HEADRACE_TARGET_DIR": str(directory),
        "HEADRACE_STREAMER_ADDRESS": f"unix:{directory}/streamer.sock",
    }
    return Environment({**values, **changes})


def test_the_defaults_are_eight_readers_of_four_mebibytes(tmp_path: Path) -> None:
    config = Config.from_environment(settings(tmp_path))
    assert (config.num_readers, config.chunk_bytes) == (8, 4 << 20)
    assert config.shared_memory_dir == Path("/dev/shm")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_TARGET_DIR", "/nowhere"),
        ("HEADRACE_STREAMER_ADDRESS", ""),
        ("HEADRACE_SHM_DIR", "/nowhere"),
        ("HEADRACE_STREAMER_READERS", "0"),
        ("HEADRACE_STREAMER_READERS", "many"),
        ("HEADRACE_STREAMER_CHUNK_BYTES", "5000"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_environment(settings(tmp_path, **{name: value}))


async def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="no safetensors file"):
        await main(settings(tmp_path))
