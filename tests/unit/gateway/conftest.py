"""A gateway with fake peers for the tests of its surface."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway_rig import GatewayRig, gateway_rig, save_toy_model


@pytest.fixture(scope="session")
def toy_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_model(tmp_path_factory.mktemp("toy-model"))


@pytest.fixture
async def rig(toy_model_dir: Path, redis_url: str) -> AsyncIterator[GatewayRig]:
    async with gateway_rig(toy_model_dir, redis_url) as rig:
        yield rig
