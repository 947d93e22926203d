from hypothesis import given
from hypothesis import strategies as st

from services.target.schedule import Load, plan_sweep

loads = st.lists(
    st.builds(
        Load,
        num_pending=st.one_of(st.just(1), st.integers(1, 500)),
        gamma=st.integers(0, 8),
    ),
    min_size=1,
    max_size=20,
)


def test_everything_that_fits_travels_together() -> None:
    plan = plan_sweep([Load(num_pending=1, gamma=4), Load(num_pending=30, gamma=4)], max_tokens=64)
    assert plan == [5, 34]


def test_a_long_prompt_travels_in_chunks_beside_the_others() -> None:
    plan = plan_sweep([Load(num_pending=90, gamma=4), Load(num_pending=1, gamma=4)], max_tokens=64)
    assert plan == [59, 5]


def test_a_short_prompt_is_not_held_up_by_long_ones_before_it() -> None:
    long = Load(num_pending=3_000, gamma=4)
    plan = plan_sweep([long, long, Load(num_pending=10, gamma=4)], max_tokens=64)
    assert plan == [25, 25, 14]


def test_prompts_keep_a_share_when_decoding_could_fill_the_sweep() -> None:
    busy = [Load(num_pending=1, gamma=7)] * 20
    plan = plan_sweep([*busy, Load(num_pending=100, gamma=0)], max_tokens=64)
    assert plan[-1] == 16
    assert sum(plan) == 64


@given(loads=loads, max_tokens=st.integers(1, 256))
def test_a_plan_keeps_its_promises(loads: list[Load], max_tokens: int) -> None:
    plan = plan_sweep(loads, max_tokens=max_tokens)
    assert any(plan), "some step advances"
    assert sum(plan) <= max(max_tokens, loads[0].num_tokens)
    for take, load in zip(plan, loads, strict=True):
        assert 0 <= take <= load.num_tokens
        is_chunk = take < load.num_tokens
        assert not is_chunk or take < load.num_pending, "draft tokens travel with the last pending"


@given(loads=loads, max_tokens=st.integers(9, 256))
def test_every_step_ends_after_finitely_many_sweeps(loads: list[Load], max_tokens: int) -> None:
    left = list(loads)
    for _ in range(len(loads) * 600):
        if not left:
            return
        plan = plan_sweep(left, max_tokens=max_tokens)
        left = [
            Load(num_pending=load.num_pending - take, gamma=load.gamma)
            for load, take in zip(left, plan, strict=True)
            if take < load.num_tokens
        ]
    raise AssertionError("steps are left over")
