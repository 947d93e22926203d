"""Greedy output through draft, target and streamer equals plain Hugging Face `generate`, float32.

50 prompts, joining and leaving as places become free; every gamma, batch size, model family;
weights streamed from the file and resident. The tokens must be equal, all of them.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from headrace.catalog.resolve import model_path
from headrace.types import SamplingParams
from tests.support.decoding import decode, decode_all, plain_greedy
from tests.support.model_services import draft_of, target_of
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, make_noisy_copy, make_tiny_model

NUM_PROMPTS = 50
GAMMAS = (0, 1, 4, 8)
BATCH_SIZES = (1, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A target, a draft that is often right, and what plain decoding makes of some prompts."""

    target: Path
    draft: Path
    prompts: list[list[int]]
    num_tokens: list[int]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def workload(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    directory = tmp_path_factory.mktemp(request.param)
    target = make_tiny_model(directory / "target", request.param)
    draft = make_noisy_copy(target, directory / "draft", noise=0.05)
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 24, (NUM_PROMPTS,), generator=generator).tolist()
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]
    num_tokens = [6 + index % 7 for index in range(NUM_PROMPTS)]
    return Workload(
        target=target,
        draft=draft,
        prompts=prompts,
        num_tokens=num_tokens,
        expected=plain_greedy(target, prompts, num_tokens),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "resident"])
async def test_every_token_equals_plain_generate(workload: Workload, is_streamed: bool) -> None:
    async with (
        target_of(workload.target, is_streamed=is_streamed, max_sweep_tokens=40) as verifier,
        draft_of(workload.draft) as proposer,
    ):
        for gamma in GAMMAS:
            for batch_size in BATCH_SIZES:
                outputs, num_offered, num_accepted = await decode_all(
                    verifier,
                    proposer,
                    workload.prompts,
                    num_tokens=workload.num_tokens,
                    gamma=gamma,
                    batch_size=batch_size,
                )
                assert outputs == workload.expected, (gamma, batch_size)
                if gamma > 0:
                    assert 0 < num_accepted < num_offered, "the draft is right and wrong at times"


async def test_a_self_draft_is_accepted_in_full(workload: Workload) -> None:
    async with target_of(workload.target) as verifier, draft_of(workload.target) as proposer:
        _, num_offered, num_accepted = await decode_all(
            verifier,
            proposer,
            workload.prompts[:10],
            num_tokens=[24] * 10,
            gamma=4,
            batch_size=4,
        )
    assert num_offered > 100
    assert num_accepted == num_offered


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_long_text_with_long_blocks_stays_equal(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target", max_context_tokens=1024)
    drafts = {
        "always right": target,
        "often right": make_noisy_copy(target, tmp_path / "draft", noise=0.05),
        "never right": make_tiny_model(tmp_path / "other", seed=9, max_context_tokens=1024),
    }
    prompt = [3, 1, 4, 1, 5]
    expected = plain_greedy(target, [prompt], [520])[0]
    for draft in drafts.values():
        async with target_of(target) as verifier, draft_of(draft) as proposer:
            output, _, _ = await decode(
                verifier,
                proposer,
                "sequence",
                prompt,
                sampling=SamplingParams(temperature=0.0),
                num_tokens=520,
                gamma=16,
            )
        assert output == expected


@asynccontextmanager
async def demo_in_float32(directory: Path) -> AsyncIterator[tuple[Path, Path]]:
    """The demo pair with its weights as float32, so that texts can be compared."""
    pair = []
    for name in ("demo", "demo-draft"):
        source, copy = model_path(name), directory / name
        copy.mkdir()
        for path in source.iterdir():
            if path.suffix == ".safetensors":
                tensors = {key: value.float() for key, value in load_file(path).items()}
                save_file(tensors, copy / path.name, metadata={"format": "pt"})
            else:
                text = path.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"')
                (copy / path.name).write_text(text)
        pair.append(copy)
    yield pair[0], pair[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_demo_model_equals_plain_generate(tmp_path: Path) -> None:
    questions = [
        "What is the capital of France?",
        "Write one sentence about the sea.",
        "List three colours.",
        "Why is the sky blue?",
    ]
    async with AsyncExitStack() as stack:
        target, draft = await stack.enter_async_context(demo_in_float32(tmp_path))
        tokenizer = AutoTokenizer.from_pretrained(target)
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )["input_ids"]
            for question in questions
        ]
        num_tokens = [16, 20, 24, 12]
        expected = plain_greedy(target, prompts, num_tokens)
        verifier = await stack.enter_async_context(target_of(target, is_streamed=True))
        proposer = await stack.enter_async_context(draft_of(draft))
        for gamma, batch_size in ((4, 1), (8, 4)):
            outputs, _, _ = await decode_all(
                verifier,
                proposer,
                prompts,
                num_tokens=num_tokens,
                gamma=gamma,
                batch_size=batch_size,
            )
            assert outputs == expected, (gamma, batch_size)
