"""Decodes through a real Verifier and Proposer, as the gateway does but without the wire."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from headrace.types import Proposal, SamplingParams
from services.draft.proposer import Proposer
from services.target.verifier import Verifier


async def decode(
    verifier: Verifier,
    proposer: Proposer,
    sequence_id: str,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams,
    num_tokens: int,
    gamma: int,
) -> tuple[list[int], int, int]:
    """Decode one sequence.

    Returns:
        Its tokens after the prompt, and how many draft tokens were offered and accepted.
    """
    max_length = len(prompt) + num_tokens
    await verifier.open(sequence_id, prompt, sampling, max_length)
    await proposer.open(sequence_id, prompt, sampling, max_length)
    tokens, step = list(prompt), 0
    news: list[int] = []
    num_offered = num_accepted = 0
    while len(tokens) < max_length:
        proposal = Proposal()
        wanted = min(gamma, max_length - len(tokens) - 1)
        if wanted > 0:
            drafted = await proposer.propose(sequence_id, step, len(tokens), news, wanted)
            proposal, news = drafted.proposal, []
        verdict = await verifier.verify(sequence_id, step, len(tokens), proposal)
        num_offered += proposal.gamma
        num_accepted += verdict.num_accepted
        tokens += verdict.output_token_ids
        news += verdict.output_token_ids
        step += 1
    await verifier.close(sequence_id)
    await proposer.close(sequence_id)
    return tokens[len(prompt) :], num_offered, num_accepted


async def decode_all(
    verifier: Verifier,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: Sequence[int],
    gamma: int,
    batch_size: int,
) -> tuple[list[list[int]], int, int]:
    """Decode many greedily, batch_size at a time: the next joins when one leaves.

    Returns:
        The tokens of each, and how many draft tokens were offered and accepted in all.
    """
    places = asyncio.Semaphore(batch_size)

    async def one(index: int) -> tuple[list[int], int, int]:
        async with places:
            return await decode(
                verifier,
                proposer,
                f"sequence-{index}",
                prompts[index],
                sampling=SamplingParams(temperature=0.0),
                num_tokens=num_tokens[index],
                gamma=gamma,
            )

    results = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return (
        [tokens for tokens, _, _ in results],
        sum(offered for _, offered, _ in results),
        sum(accepted for _, _, accepted in results),
    )


def plain_greedy(
    directory: Path, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
) -> list[list[int]]:
    """What Hugging Face `generate` gives for each prompt alone, in float32, EOS ignored."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt, count in zip(prompts, num_tokens, strict=True):
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
