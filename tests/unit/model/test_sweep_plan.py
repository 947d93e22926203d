"""How a sweep is cut: every row once, in order, in units of about the size that was asked for."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.checkpoint import TensorSpan
from headrace.model.sweep_plan import Piece, SweepPlan, WeightUse

ROW_GRAIN = 16
"""Rows by which a matrix may be cut."""


def matrix(num_rows: int, num_columns: int, *, name: str = "w", offset_bytes: int = 0) -> Piece:
    """All rows of a [rows, columns] bf16 tensor."""
    span = TensorSpan(
        name=name,
        file=Path("model.safetensors"),
        offset_bytes=offset_bytes,
        num_bytes=2 * num_rows * num_columns,
        dtype="BF16",
        shape=(num_rows, num_columns),
    )
    return Piece(span=span, begin_row=0, end_row=num_rows)


def divisible(*pieces: Piece) -> WeightUse:
    return WeightUse(pieces=pieces, is_divisible=True)


def indivisible(*pieces: Piece) -> WeightUse:
    return WeightUse(pieces=pieces, is_divisible=False)


@st.composite
def sweeps(draw: st.DrawFn) -> list[WeightUse]:
    """Uses of matrices of many shapes; each matrix has a name of its own."""
    shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=3)
    uses = draw(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12))
    return [
        WeightUse(
            pieces=tuple(
                matrix(*shape, name=f"{use}.{index}") for index, shape in enumerate(shapes)
            ),
            is_divisible=is_divisible,
        )
        for use, (shapes, is_divisible) in enumerate(uses)
    ]


def rows_of(pieces: Sequence[Piece]) -> list[tuple[str, int]]:
    return [
        (piece.span.name, row) for piece in pieces for row in range(piece.begin_row, piece.end_row)
    ]


@given(uses=sweeps(), unit_bytes=st.integers(1, 40_000))
def test_the_units_hold_every_row_once_and_in_order(uses: list[WeightUse], unit_bytes: int) -> None:
    plan = SweepPlan.pack(uses, unit_bytes=unit_bytes)
    packed = [piece for unit in plan.units for piece in unit.pieces]
    assert rows_of(packed) == rows_of([piece for use in uses for piece in use.pieces])
    assert all(piece.num_rows for piece in packed)


@given(uses=sweeps(), unit_bytes=st.integers(1, 40_000))
def test_each_use_knows_its_pieces_and_each_unit_its_first(
    uses: list[WeightUse], unit_bytes: int
) -> None:
    plan = SweepPlan.pack(uses, unit_bytes=unit_bytes)
    packed = [piece for unit in plan.units for piece in unit.pieces]
    for use, indices in zip(uses, plan.pieces_by_use, strict=True):
        assert rows_of([packed[index] for index in indices]) == rows_of(use.pieces)
    begin = 0
    for unit in plan.units:
        assert unit.first_piece == begin
        begin = unit.end_piece
    assert begin == len(packed)


@given(uses=sweeps(), unit_bytes=st.integers(1, 40_000))
def test_only_what_cannot_be_cut_makes_a_larger_unit(
    uses: list[WeightUse], unit_bytes: int
) -> None:
    plan = SweepPlan.pack(uses, unit_bytes=unit_bytes)
    indivisible_bytes = [use.num_bytes for use in uses if not use.is_divisible]
    grain_bytes = [
        min(ROW_GRAIN, piece.num_rows) * piece.num_bytes // piece.num_rows
        for use in uses
        for piece in use.pieces
    ]
    assert plan.max_unit_bytes <= max(unit_bytes, *grain_bytes, *indivisible_bytes)


@given(uses=sweeps(), unit_bytes=st.integers(1, 40_000))
def test_a_use_that_cannot_be_divided_lies_in_one_unit(
    uses: list[WeightUse], unit_bytes: int
) -> None:
    plan = SweepPlan.pack(uses, unit_bytes=unit_bytes)
    units = [range(unit.first_piece, unit.end_piece) for unit in plan.units]
    for use, indices in zip(uses, plan.pieces_by_use, strict=True):
        if not use.is_divisible:
            assert sum(indices[0] in unit and indices[-1] in unit for unit in units) == 1


@given(uses=sweeps(), unit_bytes=st.integers(1, 40_000))
def test_matrices_are_cut_at_multiples_of_the_grain(uses: list[WeightUse], unit_bytes: int) -> None:
    for unit in SweepPlan.pack(uses, unit_bytes=unit_bytes).units:
        assert all(piece.begin_row % ROW_GRAIN == 0 for piece in unit.pieces)


def test_units_are_filled_across_the_ends_of_matrices() -> None:
    plan = SweepPlan.pack(
        [divisible(matrix(48, 64, name="a")), divisible(matrix(48, 64, name="b"))],
        unit_bytes=64 * 128,  # 64 rows
    )
    assert [
        [(p.span.name, p.begin_row, p.end_row) for p in unit.pieces] for unit in plan.units
    ] == [
        [("a", 0, 48), ("b", 0, 16)],
        [("b", 16, 48)],
    ]


def test_a_unit_that_is_nearly_full_is_left_as_it_is() -> None:
    plan = SweepPlan.pack(
        [divisible(matrix(112, 64, name="a")), divisible(matrix(48, 64, name="b"))],
        unit_bytes=128 * 128,  # 128 rows: an eighth is free
    )
    assert [[piece.span.name for piece in unit.pieces] for unit in plan.units] == [["a"], ["b"]]


def test_a_piece_lies_where_its_rows_do() -> None:
    head, tail = matrix(40, 8, offset_bytes=1000).cut(16)
    assert (head.offset_bytes, head.num_bytes) == (1000, 16 * 16)
    assert (tail.offset_bytes, tail.num_bytes) == (1000 + 16 * 16, 24 * 16)


def test_a_vector_is_one_row() -> None:
    span = TensorSpan(
        name="b", file=Path("f"), offset_bytes=8, num_bytes=14, dtype="BF16", shape=(7,)
    )
    vector = Piece(span=span, begin_row=0, end_row=1)
    assert (vector.num_columns, vector.num_bytes) == (7, 14)


def equal_units(count: int) -> SweepPlan:
    """Units of 32 bytes."""
    uses = [indivisible(matrix(1, 16, name=str(index))) for index in range(count)]
    return SweepPlan.pack(uses, unit_bytes=32)


@given(count=st.integers(1, 200), share=st.floats(0, 1.1))
def test_what_stays_in_memory_fills_what_there_is_and_no_more(count: int, share: float) -> None:
    max_bytes = int(share * 32 * count)
    plan = equal_units(count).keeping(max_bytes)
    assert plan.resident_bytes == min(max_bytes // 32, count) * 32
    assert plan.resident_bytes + plan.streamed_bytes == 32 * count
    assert len(plan.streamed_units) + len(plan.resident_units) == count


@pytest.mark.parametrize("count", [10, 33, 64, 100, 487])
def test_resident_units_lie_evenly_over_the_sweep(count: int) -> None:
    for num_resident in range(2, count + 1):
        resident = sorted(equal_units(count).keeping(32 * num_resident).resident_units)
        gaps = [b - a for a, b in zip(resident, [*resident[1:], resident[0] + count], strict=True)]
        # The largest gap of n multiples of the golden ratio is phi^(2-k) for F(k) <= n < F(k+1)
        # (three-distance theorem), so below phi^3 / sqrt(5) = 1.894 times the even one.
        assert max(gaps) <= 1.894 * count / num_resident + 1, (num_resident, gaps)
