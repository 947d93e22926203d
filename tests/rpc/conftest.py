"""Where a streamer and its targets meet."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.model.sweep_plan import SweepPlan
from tests.support.streamer_rig import plan_of, shared_memory_dir


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with shared_memory_dir() as directory:
        yield directory


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/streamer.sock"


@pytest.fixture
def plan(model: Path) -> SweepPlan:
    """Of the model that each file of tests has."""
    return plan_of(model)
