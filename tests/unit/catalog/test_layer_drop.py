"""The draft is the target without some layers, and nothing else changed."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.catalog.demo import DRAFT_DROPPED_LAYERS
from headrace.catalog.layer_drop import drop_layers
from headrace.model.manifest import FILE_NAME

NUM_LAYERS = 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As deep as the demo target, but tiny."""
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"a": 1}')
    config_json = json.loads((directory / "config.json").read_text())
    config_json["layer_types"] = [f"type {layer}" for layer in range(NUM_LAYERS)]
    (directory / "config.json").write_text(json.dumps(config_json))
    return directory


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    drop_layers(target, directory, DRAFT_DROPPED_LAYERS)
    return directory


def test_the_draft_has_24_layers_and_its_lists_shorten_too(draft: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    assert config["num_hidden_layers"] == 24
    kept = [*range(12), *range(18, 30)]
    assert config["layer_types"] == [f"type {layer}" for layer in kept]


def test_other_files_come_along(draft: Path) -> None:
    assert (draft / "tokenizer.json").read_text() == '{"a": 1}'


def test_kept_layers_hold_the_targets_weights_in_order(target: Path, draft: Path) -> None:
    # transformers reads the file, so the format is checked by its reader.
    for directory in (target, draft):
        path = directory / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "layer_types": None}))
    whole = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    short = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.bfloat16)
    expected = [
        layer for index, layer in enumerate(whole.model.layers) if index not in range(12, 18)
    ]
    assert len(short.model.layers) == 24
    for ours, theirs in zip(short.model.layers, expected, strict=True):
        for name, weight in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], weight), name
    assert torch.equal(short.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    assert torch.equal(short.model.norm.weight, whole.model.norm.weight)


def test_the_targets_manifest_stays_behind(target: Path, tmp_path: Path) -> None:
    (target / FILE_NAME).write_text("{}")
    drop_layers(target, tmp_path, DRAFT_DROPPED_LAYERS)
    (target / FILE_NAME).unlink()
    assert not (tmp_path / FILE_NAME).exists()
