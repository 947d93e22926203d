from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Decode, Detokenizer
from gateway.tokenizer import Tokenizer as GatewayTokenizer


@pytest.fixture(scope="module")
def byte_level(toy_model_dir: Path) -> Decode:
    return GatewayTokenizer.load(toy_model_dir).decode


def _pieces(decode: Decode, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(token_ids=st.lists(st.integers(0, 271), max_size=40))
def test_pieces_joined_equal_decoding_all_at_once(byte_level: Decode, token_ids: list[int]) -> None:
    assert "".join(_pieces(byte_level, token_ids)) == byte_level(token_ids)


def test_a_character_over_several_tokens_comes_out_whole(toy_model_dir: Path) -> None:
    raw = Tokenizer.from_file(str(toy_model_dir / "tokenizer.json"))
    text = "aé€🎉z"
    pieces = _pieces(GatewayTokenizer.load(toy_model_dir).decode, raw.encode(text).ids)
    assert [piece for piece in pieces if piece] == list(text)


def test_an_incomplete_character_at_the_end_is_flushed(
    byte_level: Decode, toy_model_dir: Path
) -> None:
    raw = Tokenizer.from_file(str(toy_model_dir / "tokenizer.json"))
    half = raw.encode("€").ids[:2]
    assert _pieces(byte_level, half) == ["", "", byte_level(half)]
    assert byte_level(half)


def test_word_markers_keep_their_spaces() -> None:
    vocab = {"▁Hello": 0, "▁world": 1, "ly": 2, "▁": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    token_ids = [0, 1, 2, 3, 1, 0]
    pieces = _pieces(tokenizer.decode, token_ids)
    assert pieces[:3] == ["Hello", " world", "ly"]
    assert "".join(pieces) == tokenizer.decode(token_ids)


def test_special_tokens_without_end_do_not_pile_up() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return "".join("a" for token_id in token_ids if token_id)

    detokenizer = Detokenizer(decode)
    for token_id in [1] + 1_000 * [0] + [1]:
        detokenizer.push(token_id)
    assert longest <= 3
