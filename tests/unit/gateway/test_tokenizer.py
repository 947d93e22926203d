import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gateway.spec import ChatMessage
from gateway.tokenizer import Tokenizer
from headrace.errors import ConfigError, InvalidRequest
from tests.support.tiny_models import EOS_ID, save_tokenizer


async def test_chat_prompts_equal_the_template_tokenized(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé?"}]
    expected = reference.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert await tokenizer.encode_chat([ChatMessage(**turn) for turn in turns]) == expected


async def test_a_template_that_writes_bos_gets_no_second_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("<|spare0|>" + template.read_text())
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "bos_token": "<|spare0|>"}))
    tokenizer = Tokenizer.load(tmp_path)
    token_ids = await tokenizer.encode_chat([ChatMessage(role="user", content="x")])
    bos_id = token_ids[0]
    assert token_ids.count(bos_id) == 1


async def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await Tokenizer.load(tmp_path).encode_chat([ChatMessage(role="user", content="x")])


async def test_a_template_that_refuses_gives_its_reason(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await Tokenizer.load(tmp_path).encode_chat([ChatMessage(role="user", content="x")])


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        (None, 5, {5}),
        ([6, 7], 5, {6, 7}),
        (8, None, {8}),
        (None, None, {EOS_ID}),
    ],
)
def test_eos_follows_the_generation_config_then_the_config(
    tmp_path: Path,
    generation_config: int | list[int] | None,
    config: int | None,
    expected: set[int],
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": config})
    )
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(
            json.dumps({"eos_token_id": generation_config})
        )
    assert Tokenizer.load(tmp_path).eos_token_ids == expected


def test_a_directory_without_a_tokenizer_ends_the_start_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_TARGET_DIR"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_ends_the_start_with_a_hint(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version":')
    with pytest.raises(ConfigError, match="HEADRACE_TARGET_DIR"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_needs_code_of_its_own_is_refused_unread(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    config["tokenizer_class"] = "EvilTokenizer"
    config_path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="HEADRACE_TARGET_DIR"):
        Tokenizer.load(tmp_path)
