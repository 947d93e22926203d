"""With a manifest no wrong byte of weights reaches a target; what was right is not hashed again."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import Checkpoint
from headrace.model.decoder import Decoder
from headrace.model.engine import Engine, Slice
from headrace.model.manifest import BLOCK_BYTES, Manifest
from headrace.model.sweep_plan import SweepPlan, WeightUse
from tests.support.checkpoints import layer_tensors, write_sharded, write_single
from tests.support.damage import flip_bit
from tests.support.lent_weights import LentWeights
from tests.support.streamer_rig import (
    feed_from,
    plan_of,
    streamer_of,
    sweep,
    units_of,
    whole,
)
from tests.support.tiny_models import make_tiny_model, split_into_shards

TENSORS = layer_tensors([[20_000, 30], [9_000, 40_000, 2], [4_096], [50_002]])
UNITS = units_of(TENSORS)
ZEROS = [[bytes(len(piece)) for piece in unit] for unit in UNITS]
DAMAGED = "model.layers.1.part1.weight"
EMBEDDING = "model.embed_tokens.weight"
LARGE = "model.layers.1.mlp.up_proj.weight"
"""Of two blocks and a half."""
NORM = "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_single(tmp_path / "model", TENSORS)


@pytest.fixture
def decoder_model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "decoder", num_layers=2, intermediate_size=10_240)


def write_manifest(directory: Path) -> Path:
    Manifest.of(Checkpoint.open(directory), lambda *_: None).write(directory)
    return directory


class FailingDrive:
    """Reads as the system does until it has failed; zeros from then on."""

    def __init__(self) -> None:
        self.has_failed = False

    def __call__(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        num_read = os.preadv(descriptor, [buffer], offset)
        if self.has_failed:
            buffer[:num_read] = bytes(num_read)
        return num_read


def large_only(directory: Path, *, unit_bytes: int) -> SweepPlan:
    """A sweep over one large matrix, cut into units."""
    span = Checkpoint.open(directory).tensors[LARGE]
    use = WeightUse(pieces=(whole(span),), is_divisible=True)
    return SweepPlan.pack([use], unit_bytes=unit_bytes)


@pytest.mark.parametrize("num_shards", [1, 3])
async def test_a_flipped_bit_fails_every_sweep_by_the_tensors_name(
    tmp_path: Path, address: str, shared_memory: Path, num_shards: int
) -> None:
    names = list(TENSORS)
    shards = {
        f"{i}.safetensors": {n: TENSORS[n] for n in names[i::num_shards]} for i in range(num_shards)
    }
    directory = write_manifest(write_sharded(tmp_path / "model", shards))
    flip_bit(directory, DAMAGED, 12_345)
    plan = plan_of(directory)
    async with (
        streamer_of(directory, address, shared_memory),
        feed_from(address, directory) as feed,
    ):
        for _ in range(2):
            with pytest.raises(CheckpointCorrupt, match=rf"tensor {DAMAGED} in \d\.safetensors"):
                await asyncio.to_thread(sweep, feed, plan)


async def test_an_intact_checkpoint_streams_as_without_a_manifest(
    model: Path, address: str, shared_memory: Path
) -> None:
    write_manifest(model)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        for _ in range(3):
            assert await asyncio.to_thread(sweep, feed, plan_of(model)) == UNITS


async def test_without_a_manifest_nothing_is_checked(
    model: Path, address: str, shared_memory: Path
) -> None:
    flip_bit(model, DAMAGED, 12_345)
    async with streamer_of(model, address, shared_memory), feed_from(address, model) as feed:
        assert await asyncio.to_thread(sweep, feed, plan_of(model)) != UNITS


async def test_what_was_right_is_not_hashed_again_even_for_a_target_that_comes_later(
    model: Path, address: str, shared_memory: Path
) -> None:
    """Seen by a drive that brings nothing but zeros after the first sweep."""
    write_manifest(model)
    plan, drive = plan_of(model), FailingDrive()
    async with streamer_of(model, address, shared_memory, read_into=drive):
        async with feed_from(address, model) as feed:
            assert await asyncio.to_thread(sweep, feed, plan) == UNITS
            drive.has_failed = True
            await asyncio.to_thread(sweep, feed, plan)
            assert await asyncio.to_thread(sweep, feed, plan) == ZEROS
        async with feed_from(address, model) as feed:
            assert await asyncio.to_thread(sweep, feed, plan) == ZEROS


async def test_checked_are_the_bytes_in_the_slot_and_not_the_file_once_more(
    model: Path, address: str, shared_memory: Path
) -> None:
    write_manifest(model)
    drive = FailingDrive()
    drive.has_failed = True
    async with (
        streamer_of(model, address, shared_memory, read_into=drive),
        feed_from(address, model) as feed,
    ):
        with pytest.raises(CheckpointCorrupt, match=r"tensor model\.layers\.\d\.part\d\.weight"):
            await asyncio.to_thread(sweep, feed, plan_of(model))


@pytest.mark.parametrize("unit_bytes", [300_000, BLOCK_BYTES, 1_500_000])
async def test_units_that_cut_blocks_are_checked_each_by_itself(
    decoder_model: Path, address: str, shared_memory: Path, unit_bytes: int
) -> None:
    write_manifest(decoder_model)
    plan = large_only(decoder_model, unit_bytes=unit_bytes)
    span = Checkpoint.open(decoder_model).tensors[LARGE]
    content = span.file.read_bytes()[span.offset_bytes : span.offset_bytes + span.num_bytes]
    assert span.num_bytes == 2.5 * BLOCK_BYTES
    async with (
        streamer_of(decoder_model, address, shared_memory),
        feed_from(address, decoder_model, plan=plan) as feed,
    ):
        units = await asyncio.to_thread(sweep, feed, plan)
        assert b"".join(piece for unit in units for piece in unit) == content


@pytest.mark.parametrize("offset_bytes", [0, BLOCK_BYTES, 2_621_439])
async def test_no_cut_hides_a_flipped_bit(
    decoder_model: Path, address: str, shared_memory: Path, offset_bytes: int
) -> None:
    write_manifest(decoder_model)
    flip_bit(decoder_model, LARGE, offset_bytes)
    plan = large_only(decoder_model, unit_bytes=300_000)
    async with (
        streamer_of(decoder_model, address, shared_memory),
        feed_from(address, decoder_model, plan=plan) as feed,
    ):
        with pytest.raises(CheckpointCorrupt, match=LARGE):
            await asyncio.to_thread(sweep, feed, plan)


@pytest.mark.parametrize("name", [NORM, LARGE, EMBEDDING])
def test_a_model_that_is_loaded_to_stay_is_refused_at_the_start(
    decoder_model: Path, name: str
) -> None:
    write_manifest(decoder_model)
    flip_bit(decoder_model, name, 100)
    decoder = Decoder(Checkpoint.open(decoder_model))
    with pytest.raises(CheckpointCorrupt, match=rf"tensor {name} in model\.safetensors"):
        decoder.load()


@pytest.mark.parametrize("name", [NORM, LARGE])
def test_what_stays_of_a_streamed_model_is_refused_at_the_start(
    decoder_model: Path, name: str
) -> None:
    write_manifest(decoder_model)
    flip_bit(decoder_model, name, 100)
    decoder = Decoder(Checkpoint.open(decoder_model))
    plan = decoder.plan(unit_bytes=300_000)
    plan = plan.keeping(plan.streamed_bytes)
    with pytest.raises(CheckpointCorrupt, match=rf"tensor {name} in model\.safetensors"):
        decoder.stream(plan, LentWeights(plan))


def test_a_model_in_shards_with_a_manifest_computes_as_without(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3", num_layers=2)
    plain = logits_of(directory)
    split_into_shards(directory, ["a.safetensors", "b.safetensors"])
    write_manifest(directory)
    assert torch.equal(logits_of(directory), plain)


def test_a_damaged_embedding_row_is_refused_when_it_is_needed(decoder_model: Path) -> None:
    write_manifest(decoder_model)
    flip_bit(decoder_model, EMBEDDING, 0)
    with pytest.raises(CheckpointCorrupt, match=EMBEDDING):
        logits_of(decoder_model)


def logits_of(directory: Path) -> torch.Tensor:
    """Of a short text, streamed without a streamer."""
    decoder = Decoder(Checkpoint.open(directory))
    plan = decoder.plan(unit_bytes=64 << 10)
    weights = LentWeights(plan)
    decoder.stream(plan, weights)
    engine = Engine(decoder, kv_tokens=64)
    weights.begin_sweep()
    (logits,) = engine.forward(
        [Slice(kv=engine.cache.open(8), token_ids=[5, 6, 7, 6], num_logits=4)]
    )
    return logits.clone()
