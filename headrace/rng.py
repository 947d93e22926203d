"""Random numbers keyed by (seed, position, purpose): a counter, no state.

Any process can draw the number that belongs to a position of a sequence again, whatever was drawn
before it, and two purposes never share a number. The generator is Philox4x64-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"), as numpy has it.
"""

import hashlib
from enum import IntEnum

import numpy as np


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
    generator = np.random.Philox(key=seed, counter=(int(purpose) << 192) | (position << 128))
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice of a request; the first has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
