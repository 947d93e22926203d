import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings

_TEXT = st.text(alphabet="abc", max_size=12)
_STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def _deliver(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    delivered = ""
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        delivered += text
        if is_stopped:
            return delivered, True
    return delivered + matcher.flush(), False


def _first_completed(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(pieces=st.lists(_TEXT, max_size=5), stops=_STOPS)
def test_text_ends_before_the_first_completed_stop_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    assert _deliver(pieces, stops) == _first_completed("".join(pieces), stops)


def test_only_the_ambiguous_tail_is_held_back() -> None:
    matcher = StopStrings(["###", "\nUser:"])
    assert matcher.push("text #") == ("text ", False)
    assert matcher.push(" more\nUs") == ("# more", False)
    assert matcher.push("ual") == ("\nUsual", False)
    assert matcher.push("##") == ("", False)
    assert matcher.flush() == "##"


@pytest.mark.parametrize("position", range(4))
def test_a_stop_is_found_at_every_position_of_a_block(position: int) -> None:
    block = "xxxx"[:position] + "END" + "yyyy"
    assert StopStrings(["END"]).push(block) == ("xxxx"[:position], True)
