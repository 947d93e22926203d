import pytest

from headrace.errors import ConfigError
from headrace.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [  # `numfmt --from=iec` gives the same, fractions of a byte aside
        ("4096", 4096),
        ("1500M", 1_572_864_000),
        ("6.8G", 7_301_444_403),
        ("6.8 GiB", 7_301_444_403),
        ("1gb", 1_073_741_824),
        (".5k", 512),
        ("2T", 2_199_023_255_552),
    ],
)
def test_sizes_are_read_as_numfmt_reads_them(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "0", "-1G", "1X", "1e9", "nan", "lots"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give something like"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(12, "12 B"), (1536, "1.50 KiB"), (340 << 20, "340 MiB"), (3 << 41, "6.00 TiB")],
)
def test_sizes_are_shown_with_a_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
