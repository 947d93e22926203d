"""Which rows of its inputs a rearrangement puts where.

Found by running it on small tensors that number their own elements. They have all the rows of the
real ones but few columns, so that a model of any size is traced at once. Knows nothing of models.
"""

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

_NUM_COLUMNS = 6
"""Enough to show how columns are moved: halves and thirds, even and odd ones."""
_MAX_RUNS_PER_INPUT = 8
"""Rows that are scattered more finely are not worth reading as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRows:
    """Consecutive rows of one input, seen as [rows, columns]; a vector is one row."""

    input_index: int
    begin_row: int
    end_row: int


def narrow(shape: Sequence[int]) -> torch.Size:
    """The same shape with few columns; vectors keep their length."""
    if len(shape) < 2:
        return torch.Size(shape)
    return torch.Size((*shape[:-1], min(shape[-1], _NUM_COLUMNS)))


def trace_rows(
    rearrange: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    input_shapes: Sequence[torch.Size],
    output_shapes: Sequence[torch.Size],
) -> list[tuple[InputRows, ...] | None]:
    """The rows which, one after the other and viewed as its shape, are each output.

    Args:
        rearrange: Gives the outputs for inputs of the shapes narrowed, of any type.
        input_shapes: Of the real inputs.
        output_shapes: Of the real outputs.

    Returns:
        For each output; None where it is something else, or rows that are scattered finely or of
        several widths.
    """
    ends = list(accumulate(narrow(shape).numel() for shape in input_shapes))
    numbers = torch.arange(ends[-1], dtype=torch.int32).tensor_split(ends[:-1])
    inputs = [n.view(narrow(s)) for n, s in zip(numbers, input_shapes, strict=True)]
    try:
        outputs = rearrange(inputs)
    except (RuntimeError, ValueError, LookupError):  # it needs more columns than there are
        return [None] * len(output_shapes)
    return [
        _rows_of(output.flatten(), ends, input_shapes, output_shape)
        for output, output_shape in zip(outputs, output_shapes, strict=True)
    ]


def _rows_of(
    numbers: Tensor,
    ends: Sequence[int],
    input_shapes: Sequence[torch.Size],
    output_shape: torch.Size,
) -> tuple[InputRows, ...] | None:
    """The rows that a narrow output is, by the numbers of its elements.

    Args:
        numbers: Of the output's elements in order.
        ends: [inputs] the number after each input's last element.
        input_shapes: Of the real inputs.
        output_shape: Of the real output.
    """
    cuts = (numbers.diff() != 1).nonzero().flatten() + 1
    if cuts.numel() >= _MAX_RUNS_PER_INPUT * len(input_shapes):
        return None
    rows: list[InputRows] = []
    for run in numbers.tensor_split(cuts):
        for index, begin, end in _split_by_input(int(run[0]), run.numel(), ends):
            shape = narrow(input_shapes[index])
            first = begin - ends[index] + shape.numel()
            if first % _num_columns(shape) or (end - begin) % _num_columns(shape):
                return None
            begin_row = first // _num_columns(shape)
            end_row = begin_row + (end - begin) // _num_columns(shape)
            rows.append(InputRows(input_index=index, begin_row=begin_row, end_row=end_row))
    return tuple(rows) if _is_whole(rows, input_shapes, output_shape) else None


def _split_by_input(begin: int, length: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Index of the input, begin and end of each part of consecutive numbers."""
    end = begin + length
    while begin < end:
        index = bisect(ends, begin)
        yield index, begin, min(end, ends[index])
        begin = ends[index]


def _is_whole(
    rows: Sequence[InputRows], input_shapes: Sequence[torch.Size], output_shape: torch.Size
) -> bool:
    """Whether real rows are the whole real output, and of one width."""
    widths = [_num_columns(input_shapes[part.input_index]) for part in rows]
    num_elements = sum(
        (part.end_row - part.begin_row) * width for part, width in zip(rows, widths, strict=True)
    )
    return num_elements == output_shape.numel() and len(set(widths)) == 1


def _num_columns(shape: torch.Size) -> int:
    return shape[-1] if shape else 1
