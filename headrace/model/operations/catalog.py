"""Which operations a decoder consists of."""

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn

from headrace.model.checkpoint import TensorSpan
from headrace.model.conversion import ParameterSource, RowRun
from headrace.model.formats import float8
from headrace.model.operations.batched_experts import (
    BatchedExpertsOperation,
    is_batched_experts,
)
from headrace.model.operations.experts import ExpertsOperation, first_projection, is_experts
from headrace.model.operations.linear import LinearOperation
from headrace.model.operations.operation import Operation
from headrace.model.operations.whole import BorrowedParameter, WholeOperation
from headrace.model.sweep_plan import Piece

Tensors = Mapping[str, TensorSpan]
Sources = Mapping[str, ParameterSource]


def operations_of(module: nn.Module, sources: Sources, tensors: Tensors) -> dict[str, Operation]:
    """The operations that can borrow their weights, by module name; embeddings are none.

    Args:
        module: The decoder.
        sources: Of its parameters, by name.
        tensors: Of the checkpoint, by name.
    """
    operations: dict[str, Operation] = {}
    for name, owner in module.named_modules():
        large = {
            f"{name}.{attribute}"
            for attribute, parameter in owner.named_parameters(recurse=False)
            if parameter.dim() > 1
        }
        if large and not isinstance(owner, nn.Embedding):
            operations[name] = _operation(name, owner, large, sources, tensors)
    return operations


def embeddings_of(module: nn.Module) -> dict[str, nn.Embedding]:
    """The embeddings, by name of their parameter."""
    return {
        f"{name}.weight": owner
        for name, owner in module.named_modules()
        if isinstance(owner, nn.Embedding)
    }


def pieces_of(runs: Sequence[RowRun], tensors: Tensors) -> tuple[Piece, ...]:
    """The same rows as pieces."""
    return tuple(
        Piece(span=tensors[run.tensor_name], begin_row=run.begin_row, end_row=run.end_row)
        for run in runs
    )


def _operation(
    name: str, owner: nn.Module, large: set[str], sources: Sources, tensors: Tensors
) -> Operation:
    if type(owner).forward is nn.Linear.forward and isinstance(owner, nn.Linear):
        source = sources[f"{name}.weight"]
        if source.runs is not None:
            pieces = pieces_of(source.runs, tensors)
            is_scaled = any(float8.is_float8(piece.span) for piece in pieces)
            scales = [float8.scale_of(piece, tensors) for piece in pieces] if is_scaled else []
            return LinearOperation(owner, f"{name}.weight", pieces, scales)
    if is_experts(owner):
        names = (f"{name}.{first_projection(owner)}", f"{name}.down_proj")
        projections = [_by_expert(sources[n], tensors) for n in names]
        if all(projections):
            return ExpertsOperation(owner, frozenset(names), *projections)
    if is_batched_experts(owner):
        names = (f"{name}.gate_up_proj", f"{name}.down_proj")
        projections = [_by_expert(sources[n], tensors) for n in names]
        if all(projections):
            return BatchedExpertsOperation(owner, frozenset(names), *projections)
    return WholeOperation(owner, {n: _borrowed(sources[n], tensors) for n in sorted(large)})


def _borrowed(source: ParameterSource, tensors: Tensors) -> BorrowedParameter:
    if source.runs is not None:
        return BorrowedParameter(source=source, pieces=pieces_of(source.runs, tensors))
    spans = [tensors[name] for name in source.tensor_names]
    whole = tuple(Piece(span=s, begin_row=0, end_row=prod(s.shape[:-1])) for s in spans)
    return BorrowedParameter(source=source, pieces=whole)


def _by_expert(source: ParameterSource, tensors: Tensors) -> list[tuple[Piece, ...]]:
    """[E] the pieces of each expert's part of a stacked parameter; empty if they are not rows."""
    if source.runs is None:
        return []
    num_experts, num_rows = source.shape[0], source.shape[1]
    experts: list[list[Piece]] = [[] for _ in range(num_experts)]
    row = 0
    for piece in pieces_of(source.runs, tensors):
        rest = piece
        while rest.num_rows:
            expert, within = divmod(row, num_rows)
            head, rest = rest.cut(min(rest.num_rows, num_rows - within))
            experts[expert].append(head)
            row += head.num_rows
    return [tuple(pieces) for pieces in experts]
