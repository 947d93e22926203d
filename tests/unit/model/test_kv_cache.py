import pytest
import torch

from headrace.errors import InvalidRequest, KVExhausted
from headrace.model.device import CPU
from headrace.model.kv_cache import KVCache, LayerKVShape


def make_cache(num_blocks: int = 4, block_size: int = 2) -> KVCache:
    shape = LayerKVShape(num_heads=1, key_dim=2, value_dim=2)
    return KVCache(
        [shape], num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=CPU
    )


def test_sequences_never_share_rows() -> None:
    cache = make_cache()
    first, second = cache.open(3), cache.open(4)
    assert not set(first.rows.tolist()) & set(second.rows.tolist())


def test_blocks_come_back_when_a_sequence_closes() -> None:
    cache = make_cache()
    for _ in range(3):
        sequences = [cache.open(4), cache.open(4)]
        assert cache.num_free_blocks == 0
        for sequence in sequences:
            cache.close(sequence)
    assert cache.num_free_blocks == 4


def test_a_sequence_that_fits_later_is_told_apart_from_one_that_never_fits() -> None:
    cache = make_cache()
    cache.open(6)
    with pytest.raises(KVExhausted):
        cache.open(4)
    with pytest.raises(InvalidRequest, match="lower max_tokens"):
        cache.open(9)
