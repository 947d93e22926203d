import numpy as np
import pytest
from scipy import stats

from headrace.rng import Purpose, choice_seed, uniform


def test_a_number_depends_on_its_key_alone() -> None:
    first = uniform(7, 3, Purpose.ACCEPT)
    uniform(8, 1, Purpose.DRAFT)
    assert uniform(7, 3, Purpose.ACCEPT) == first


def test_seed_position_and_purpose_all_matter_over_their_whole_range() -> None:
    keys = [
        (seed, position, purpose)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for position in (0, 1, 2**31, 2**40)
        for purpose in Purpose
    ]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_numbers_are_uniform_and_purposes_are_independent() -> None:
    count = 20_000
    draws = {
        purpose: np.array([uniform(5, position, purpose) for position in range(count)])
        for purpose in Purpose
    }
    for values in draws.values():
        assert values.min() >= 0.0
        assert values.max() < 1.0
        assert stats.kstest(values, "uniform").pvalue > 1e-4
    for one in Purpose:
        for other in Purpose:
            if one < other:
                correlation = stats.pearsonr(draws[one], draws[other])
                assert correlation.pvalue > 1e-4


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    by_seed = np.array([uniform(seed, 0, Purpose.DRAFT) for seed in range(20_000)])
    assert stats.kstest(by_seed, "uniform").pvalue > 1e-4
    assert stats.pearsonr(by_seed[:-1], by_seed[1:]).pvalue > 1e-4


def test_the_generator_is_philox_as_published() -> None:
    # The paper's known-answer test for key 0 and counter 0.
    assert uniform(0, 0, Purpose.DRAFT) == (0x16554D9ECA36314C >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 1, 12_345, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4_095, 2**40])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_every_number_is_numpys_philox_too(seed: int, position: int, purpose: Purpose) -> None:
    counter = position + (purpose << 64)
    # numpy counts up before it draws.
    theirs = np.random.Philox(key=seed, counter=(counter - 1) % 2**256).random_raw()
    assert uniform(seed, position, purpose) == (int(theirs) >> 11) * 2.0**-53


def test_the_first_choice_has_the_requests_own_seed() -> None:
    assert choice_seed(9, 0) == 9
    seeds = [choice_seed(9, index) for index in range(16)]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
