"""A target whose streamer fails: typed errors, then the same tokens as if nothing had happened."""

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import PeerUnavailable
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.types import Proposal, SamplingParams, SparseRow, Verdict
from services.target.verifier import Verifier
from tests.support.decoding import plain_greedy
from tests.support.model_services import target_on
from tests.support.streamer_rig import (
    WatchedReads,
    end,
    shared_memory_dir,
    start_streamer_process,
    streamer_of,
)
from tests.support.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [90, 91], list(range(100, 121))]
NUM_TOKENS = 12
NUM_LAYERS = 4
LAYER_BYTES = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
"""Of the matrices of attention and MLP, float32."""
NUM_UNITS = NUM_LAYERS + 1
"""With the head, when a slot has the size of a layer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """What the plain model says after each prompt."""
    return plain_greedy(model, PROMPTS, [NUM_TOKENS] * len(PROMPTS))


class Gateway:
    """Decodes prompts with guesses that are right and wrong in turn; repeats what fails."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.errors: list[PeerUnavailable] = []

    async def decode_all(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens after each prompt, given what they should be."""
        return await asyncio.gather(*(self.decode(i, text) for i, text in enumerate(texts)))

    async def decode(self, index: int, text: Sequence[int]) -> list[int]:
        sequence_id, prompt = f"sequence-{index}", PROMPTS[index]
        await self.verifier.open(sequence_id, prompt, GREEDY, len(prompt) + NUM_TOKENS)
        tokens: list[int] = []
        step = 0
        while len(tokens) < NUM_TOKENS:
            verdict = await self._verify(
                sequence_id, step, len(prompt) + len(tokens), guess(text[len(tokens) :], step)
            )
            tokens.extend(verdict.output_token_ids)
            step += 1
        return tokens

    async def _verify(
        self, sequence_id: str, step: int, committed_length: int, proposal: Proposal
    ) -> Verdict:
        while True:
            try:
                return await self.verifier.verify(sequence_id, step, committed_length, proposal)
            except PeerUnavailable as error:
                self.errors.append(error)


def guess(text: Sequence[int], step: int) -> Proposal:
    """Up to three tokens: right ones, or right, wrong, right."""
    tokens = list(text[:-1][:3])
    if step % 2 and len(tokens) > 1:
        tokens[1] = (tokens[1] + 1) % 256
    rows = [SparseRow(token_ids=np.array([t]), probs=np.ones(1, np.float32)) for t in tokens]
    return Proposal(token_ids=tuple(tokens), draft_rows=tuple(rows))


@asynccontextmanager
async def streamed(
    model: Path, reads: WatchedReads, *, max_sweep_tokens: int = 256
) -> AsyncIterator[Gateway]:
    """A target whose every unit is one read, begun when the unit before was given back."""
    with shared_memory_dir() as shared_memory:
        address = f"unix:{shared_memory}/streamer.sock"
        async with (
            streamer_of(model, address, shared_memory, chunk_bytes=1 << 20, read_into=reads),
            target_on(
                model,
                address,
                unit_bytes=LAYER_BYTES,
                num_slots=1,
                max_sweep_tokens=max_sweep_tokens,
            ) as verifier,
        ):
            yield Gateway(verifier)


def read_of(*, sweep: int, unit: int) -> int:
    """Number of the read that brings a unit; the first of all only asks for direct reads."""
    return 1 + sweep * NUM_UNITS + unit


def test_a_unit_is_a_layer_or_the_head(model: Path) -> None:
    plan = Decoder(Checkpoint.open(model)).plan(unit_bytes=LAYER_BYTES)
    assert [unit.num_bytes for unit in plan.units] == [LAYER_BYTES] * NUM_LAYERS + [4 * 272 * 64]


@pytest.mark.parametrize("max_sweep_tokens", [256, 8])
@pytest.mark.parametrize(("sweep", "unit"), [(0, 1), (1, 4), (2, 2)])
async def test_after_a_read_error_the_repeated_step_gives_the_tokens_of_an_undisturbed_run(
    model: Path, plain: list[list[int]], sweep: int, unit: int, max_sweep_tokens: int
) -> None:
    reads = WatchedReads()
    reads.fail_at(read_of(sweep=sweep, unit=unit), errno.EIO)
    async with streamed(model, reads, max_sweep_tokens=max_sweep_tokens) as gateway:
        assert await gateway.decode_all(plain) == plain
    assert {error.message for error in gateway.errors} == {
        "model.safetensors cannot be read: Input/output error"
    }
    assert len(gateway.errors) <= len(PROMPTS)  # one sweep failed, no more


async def test_a_read_error_between_two_sweeps_changes_no_token(
    model: Path, plain: list[list[int]]
) -> None:
    reads = WatchedReads()
    reads.fail_at(read_of(sweep=2, unit=0), errno.EIO)
    async with streamed(model, reads) as gateway:
        assert await gateway.decode_all(plain) == plain
    assert reads.num_failed == 1


async def test_a_sequence_that_was_not_in_the_failed_sweep_notices_nothing(
    model: Path, plain: list[list[int]]
) -> None:
    reads = WatchedReads()
    reads.fail_at(read_of(sweep=2, unit=1), errno.EIO)
    async with streamed(model, reads) as gateway:
        verifier, length = gateway.verifier, len(PROMPTS[0])
        await verifier.open("resting", PROMPTS[0], GREEDY, length + 2)
        verdict = await verifier.verify("resting", 0, length, Proposal())
        assert await gateway.decode(1, plain[1]) == plain[1]
        assert len(gateway.errors) == 1
        assert await verifier.verify("resting", 0, length, Proposal()) == verdict
        after = await verifier.verify("resting", 1, length + 1, Proposal())
        assert [*verdict.output_token_ids, *after.output_token_ids] == plain[0][:2]


async def test_a_killed_streamer_only_delays_the_tokens_until_another_one_runs(
    model: Path, plain: list[list[int]]
) -> None:
    with shared_memory_dir() as shared_memory:
        address = f"unix:{shared_memory}/streamer.sock"
        streamer = await start_streamer_process(model, address, shared_memory)
        try:
            async with target_on(model, address) as verifier:
                gateway = Gateway(verifier)
                assert await gateway.decode(0, plain[0]) == plain[0]
                os.kill(streamer.pid, signal.SIGKILL)
                await end(streamer)
                assert streamer.returncode == -signal.SIGKILL
                length = len(PROMPTS[1])
                await verifier.open("early", PROMPTS[1], GREEDY, length + 1)
                for _ in range(2):
                    with pytest.raises(PeerUnavailable, match="the streamer does not answer"):
                        await verifier.verify("early", 0, length, Proposal())
                streamer = await start_streamer_process(model, address, shared_memory)
                assert await gateway.decode_all(plain) == plain
                verdict = await verifier.verify("early", 0, length, Proposal())
                assert list(verdict.output_token_ids) == plain[1][:1]
        finally:
            await end(streamer)
