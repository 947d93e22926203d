import pytest

from gateway.models import check_pair
from headrace.errors import ConfigError
from tests.support.fake_peers import model_info


def test_padding_of_the_output_rows_may_differ() -> None:
    check_pair(
        model_info("big", vocab_size=152_064),
        model_info("small", vocab_size=151_936),
        num_tokens=151_665,
    )


def test_another_tokenizer_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_pair(
            model_info("big"), model_info("small", tokenizer_fingerprint="other"), num_tokens=10
        )


def test_fewer_rows_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="output rows"):
        check_pair(model_info("big"), model_info("small", vocab_size=9), num_tokens=10)
