from collections.abc import Sequence as Tokens

import pytest

from gateway.sequence import Sequence
from gateway.spec import GenerationSpec
from headrace.types import SamplingParams

EOS = 0


def _decode(token_ids: Tokens[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids if token_id != EOS)


def _sequence(
    *,
    max_tokens: int = 100,
    gamma: int = 4,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> Sequence:
    spec = GenerationSpec(
        operation="text_completion",
        prompt_token_ids=(1, 2, 3),
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stop=stop,
        gamma=gamma,
        ignore_eos=ignore_eos,
    )
    return Sequence(
        spec,
        sequence_id="request/0",
        index=0,
        sampling=spec.sampling,
        decode=_decode,
        eos_token_ids=[EOS],
    )


def _tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


@pytest.mark.parametrize("position", range(5))
def test_eos_ends_at_any_position_of_a_block_and_gives_no_text(position: int) -> None:
    sequence = _sequence()
    block = _tokens("abcde")
    block[position] = EOS
    delta = sequence.advance(block)
    assert delta.finish_reason == "stop"
    assert delta.text == "abcde"[:position]
    assert delta.token_ids == tuple(block[: position + 1])
    assert sequence.token_ids == [1, 2, 3, *block[: position + 1]]


def test_ignored_eos_goes_on() -> None:
    delta = _sequence(ignore_eos=True).advance([ord("a"), EOS, ord("b")])
    assert (delta.text, delta.finish_reason) == ("ab", None)


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_a_block_longer_than_max_tokens_is_cut_there(max_tokens: int) -> None:
    sequence = _sequence(max_tokens=max_tokens)
    delta = sequence.advance(_tokens("abcdefg"))
    assert delta.text == "abcdefg"[:max_tokens]
    assert len(delta.token_ids) == max_tokens
    assert delta.finish_reason == "length"


@pytest.mark.parametrize("num_committed", range(6))
def test_gamma_leaves_one_token_to_the_target(num_committed: int) -> None:
    sequence = _sequence(max_tokens=6, gamma=4)
    sequence.advance(_tokens("abcdef"[:num_committed]))
    assert sequence.gamma == min(4, 6 - num_committed - 1)


@pytest.mark.parametrize("position", range(4))
def test_a_stop_string_ends_the_tokens_with_the_one_that_completes_it(position: int) -> None:
    sequence = _sequence(stop=("XY",))
    block = "abcd"[:position] + "XY" + "efgh"
    delta = sequence.advance(_tokens(block))
    assert delta.text == "abcd"[:position]
    assert _decode(delta.token_ids) == "abcd"[:position] + "XY"
    assert delta.finish_reason == "stop"


def test_a_stop_string_over_two_blocks_never_shows_its_beginning() -> None:
    sequence = _sequence(stop=("XYZ",))
    assert sequence.advance(_tokens("abX")).text == "ab"
    assert sequence.advance(_tokens("Y")).text == ""
    assert sequence.advance(_tokens("Zc")).text == ""
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("end", ["eos", "length"])
def test_what_is_held_back_comes_out_at_the_end(end: str) -> None:
    sequence = _sequence(stop=("XYZ",), max_tokens=4 if end == "length" else 100)
    delta = sequence.advance([*_tokens("abXY"), EOS])
    assert delta.text == "abXY"


def test_steps_are_numbered_from_zero() -> None:
    sequence = _sequence()
    assert [sequence.advance(_tokens("ab")).step_index for _ in range(3)] == [0, 1, 2]
    assert sequence.step_index == 3
