"""Random numbers keyed by (seed, position, purpose): a counter, no state.

Any process can draw the number that belongs to a position of a sequence again, whatever was drawn
before it, and two purposes never share a number. The generator is Philox4x64-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"), in plain integers: the same on every platform,
and for one number at a time faster than to make a generator of numpy's.
"""

import hashlib
from enum import IntEnum

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_KEY_SCHEDULE = tuple(tuple(index * step & _MASK for step in _KEY_STEPS) for index in range(10))
"""What each of the ten rounds adds to the key."""


class Purpose(IntEnum):
    """What a random number decides; part of the key, so the values must never change."""

    DRAFT = 0
    """Which draft token is proposed."""
    ACCEPT = 1
    """Whether a draft token survives."""
    RECOVER = 2
    """Which token replaces the first rejected one."""
    BONUS = 3
    """Which token follows when all were accepted."""


def uniform(seed: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits.

    Args:
        seed: 0 to 2^64 - 1.
        position: Index in the sequence, prompt included, of the token that is decided.
        purpose: What for.
    """
    return (_philox_word(seed, position, int(purpose)) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice of a request; the first has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _philox_word(key: int, counter_0: int, counter_1: int) -> int:
    """First word of Philox4x64-10: key (key, 0), counter (counter_0, counter_1, 0, 0)."""
    word_0, word_1, word_2, word_3 = counter_0, counter_1, 0, 0
    multiplier_0, multiplier_1 = _MULTIPLIERS
    for step_0, step_1 in _KEY_SCHEDULE:
        product_0, product_1 = multiplier_0 * word_0, multiplier_1 * word_2
        word_0, word_1 = (product_1 >> 64) ^ word_1 ^ (key + step_0 & _MASK), product_1 & _MASK
        word_2, word_3 = (product_0 >> 64) ^ word_3 ^ step_1, product_0 & _MASK
    return word_0
