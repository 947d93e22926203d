"""A model on a CUDA device, resident and streamed, against the plain model on the processor."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.model.checkpoint import Checkpoint
from headrace.model.device import open_device
from headrace.model.engine import Engine, Slice
from headrace.types import Proposal, SamplingParams
from tests.support.decoding import plain_greedy
from tests.support.model_services import target_of
from tests.support.tiny_models import ARCHITECTURES, make_tiny_model

pytestmark = pytest.mark.gpu

TOKENS = [5, 9, 200, 31, 7, 7, 80]
PARENTS = [-1, -1, 0, 1, 2, 2, 3]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Keep float32 products from being rounded to fewer bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_processor(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny_model(tmp_path, family))
    logits = []
    for name in ("cpu", "cuda"):
        engine = Engine.resident(checkpoint, kv_tokens=64, device=open_device(name))
        first, second = engine.cache.open(20), engine.cache.open(20)
        chain = [
            Slice(kv=first, token_ids=TOKENS, num_logits=7),
            Slice(kv=second, token_ids=TOKENS[:3], num_logits=3),
        ]
        tree = [Slice(kv=second, token_ids=TOKENS, num_logits=7, parents=PARENTS)]
        logits.append(torch.cat([*engine.forward(chain), *engine.forward(tree)]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


async def test_a_streamed_target_decodes_what_the_plain_model_does(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    async with target_of(directory, is_streamed=True, device=open_device("cuda")) as verifier:
        tokens = list(TOKENS)
        await verifier.open("one", TOKENS, SamplingParams(temperature=0.0), 40)
        for step in range(20):
            verdict = await verifier.verify("one", step, len(tokens), Proposal())
            tokens += verdict.output_token_ids
    (plain,) = plain_greedy(directory, [TOKENS], [20])
    assert tokens[len(TOKENS) :] == plain
