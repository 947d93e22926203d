"""Sizes in bytes as people write them: 6.8G, 1500M, 4.26GB. Powers of 1024, as in numfmt's IEC."""

import re

from headrace.errors import ConfigError

_UNITS = "KMGT"
_SIZE = re.compile(rf"(\d+(?:\.\d+)?|\.\d+)\s*(?:([{_UNITS}])(?:iB|B)?|B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """A size in bytes, rounded down.

    Raises:
        ConfigError: It is no size above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    num_bytes = 0
    if match is not None:
        number, unit = match.groups()
        num_bytes = int(float(number) * 1024 ** (_UNITS.index(unit.upper()) + 1 if unit else 0))
    if num_bytes <= 0:
        raise ConfigError(f"{text!r} is not a size: give something like 6.8G or 1500M")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """A size with three or four digits and a unit: 1.50 GiB, 340 MiB, 12 B."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
