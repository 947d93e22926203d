"""The draft's batches: proposals go out while somebody else's long prompt is read."""

import asyncio
from pathlib import Path

from headrace.types import SamplingParams
from tests.support.model_services import draft_of
from tests.support.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)


async def test_a_short_prompt_gets_its_proposal_before_a_long_one_is_read(tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path, max_context_tokens=4096)
    order: list[str] = []
    async with draft_of(draft) as proposer:

        async def propose(name: str, length: int) -> None:
            await proposer.open(name, [1] * length, GREEDY, length + 8)
            await proposer.propose(name, 0, length, [], 4)
            order.append(name)

        long = asyncio.create_task(propose("long", 3_000))
        await asyncio.sleep(0)  # it is first in the queue
        await propose("short", 10)
        await long
    assert order == ["short", "long"]


async def test_a_long_prompt_read_in_chunks_gives_the_same_proposal(tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path, max_context_tokens=2048)
    prompt = [index % 250 for index in range(700)]
    async with draft_of(draft) as proposer:
        await proposer.open("whole", prompt, GREEDY, 720)
        chunked = await proposer.propose("whole", 0, 700, [], 6)
        await proposer.open("parts", prompt[:200], GREEDY, 720)
        await proposer.propose("parts", 0, 200, [], 1)
        for step, end in enumerate(range(300, 700, 100), start=1):
            await proposer.propose("parts", step, end, prompt[end - 100 : end], 1)
        stepwise = await proposer.propose("parts", 5, 700, prompt[600:], 6)
    assert stepwise.proposal.token_ids == chunked.proposal.token_ids
