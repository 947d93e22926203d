"""How a module's parameters are made of the tensors of a checkpoint.

transformers changes checkpoints as it loads them: names, experts stacked, projections fused or
split. Here the same conversions are worked out for each parameter by itself, without loading
anything: where a parameter is just rows of file tensors, they are found by running the library's
operations on small tensors that number their own elements.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from headrace.errors import CheckpointCorrupt
from headrace.model.checkpoint import TensorSpan
from headrace.model.row_tracing import InputRows, narrow, trace_rows

_TEXT_PREFIX = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.")
"""What multimodal models put before the names of the decoder that they contain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Consecutive rows of one file tensor, seen as [rows, columns].

    Columns are its last dimension. A vector is one row.
    """

    tensor_name: str
    begin_row: int
    end_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """What one parameter of a module is made of."""

    shape: torch.Size
    """Of the parameter."""
    dtype: torch.dtype
    """Of the parameter."""
    tensor_names: tuple[str, ...]
    """File tensors."""
    runs: tuple[RowRun, ...] | None
    """The rows which, one after the other and viewed as shape, are the parameter.

    None where it is something else than that.
    """
    _conversion: "_Conversion | None" = field(default=None, repr=False)
    """None where the one tensor is the parameter."""
    _name: str = field(default="", repr=False)
    """The parameter's name among what the conversion makes."""

    def assemble(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameter.

        Args:
            tensors: At least those of tensor_names.

        Returns:
            Of shape and dtype; a view of the tensor where no operation is needed.
        """
        if self._conversion is None:
            (name,) = self.tensor_names
            return tensors[name].to(self.dtype)
        return self._conversion.run(tensors)[self._name].to(self.dtype)


def parameter_sources(
    module: nn.Module, tensors: Mapping[str, TensorSpan]
) -> dict[str, ParameterSource]:
    """What each parameter and each persistent buffer of a module is made of.

    Parameters that are tied in the module and yet held apart by the checkpoint are untied: they may
    differ.

    Args:
        module: A transformers model; no parameter needs a value.
        tensors: Of the checkpoint, by name; those that the model has no use for are ignored.

    Returns:
        By name; tied parameters under each of their names.

    Raises:
        CheckpointCorrupt: Parameters have no tensors, or tensors of another shape.
    """
    places: dict[str, Tensor] = module.state_dict(keep_vars=True)
    dtypes = _dtypes(module, places)
    tracer = _RowTracer(module, tensors)
    sources: dict[str, ParameterSource] = {}
    for first_name, conversion in _conversions(module, places, tensors).items():
        for name, (shape, runs) in tracer.trace(first_name, conversion).items():
            if name not in places:
                continue
            if shape != places[name].shape:
                raise CheckpointCorrupt(
                    f"tensor {name} has shape {list(shape)}, "
                    f"config.json asks for {list(places[name].shape)}"
                )
            sources[name] = ParameterSource(
                shape=shape,
                dtype=dtypes[name],
                tensor_names=_tensor_names(conversion),
                runs=runs,
                _conversion=None if isinstance(conversion, str) else conversion,
                _name=name,
            )
    return _with_tied(module, places, sources)


def _dtypes(module: Any, places: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Each parameter's type; some models keep a few in float32 whatever the others are in."""
    dtypes = {name: place.dtype for name, place in places.items()}
    plan = module._get_dtype_plan(module.dtype)
    if plan:
        pattern, glob_by_group, _ = build_glob_alternation(list(plan))
        for name in places:
            match = pattern.search(name)
            if match is not None:
                dtypes[name] = plan[glob_by_group[match.lastgroup]]
    return dtypes


def _with_tied(
    module: nn.Module, places: Mapping[str, Tensor], sources: Mapping[str, ParameterSource]
) -> dict[str, ParameterSource]:
    """Let tied parameters share a source; untie those that have tensors of their own."""
    by_identity: dict[int, ParameterSource] = {}
    for name, source in sources.items():
        if by_identity.setdefault(id(places[name]), source) is not source:
            owner_name, _, attribute = name.rpartition(".")
            own = nn.Parameter(torch.empty_like(places[name]), requires_grad=False)
            setattr(module.get_submodule(owner_name), attribute, own)
    complete = {
        name: sources.get(name) or by_identity.get(id(place)) for name, place in places.items()
    }
    missing = [name for name, source in complete.items() if source is None]
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise CheckpointCorrupt(
            f"the checkpoint lacks {len(missing)} tensors of its architecture: {listed}"
        )
    return {name: source for name, source in complete.items() if source is not None}


class _Conversion:
    """One converter of transformers' and the file tensors that it turns into parameters."""

    def __init__(self, module: Any, converter: WeightConverter, first_name: str) -> None:
        self.converter = converter
        self.names_by_pattern: dict[str, list[str]] = {}
        self._module = module
        self._first_name = first_name

    def run(self, tensors: Mapping[str, Tensor], model: Any = None) -> dict[str, Tensor]:
        """What it makes of the tensors, by parameter name.

        Args:
            tensors: Real ones, or such as stand for them.
            model: Where operations look parameters' shapes up; the module itself by default.
        """
        converter = deepcopy(self.converter)
        for pattern, names in self.names_by_pattern.items():
            converter.collected_tensors[pattern] = [tensors[name] for name in names]
        outputs = converter.convert(
            self._first_name, model=model or self._module, config=self._module.config
        )
        return {name: o[0] if isinstance(o, list) else o for name, o in outputs.items()}


def _tensor_names(conversion: _Conversion | str) -> tuple[str, ...]:
    if isinstance(conversion, str):
        return (conversion,)
    return tuple(name for names in conversion.names_by_pattern.values() for name in names)


class _Renaming:
    """transformers' rules for what a file tensor is called in a module, and what converts it.

    Follows transformers.core_model_loading.convert_and_load_state_dict_in_model.
    """

    def __init__(self, module: Any, places: Mapping[str, Tensor]) -> None:
        mapping = get_model_conversion_mapping(module)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = module.base_model_prefix
        self._places = places

    def place_of(self, tensor_name: str) -> tuple[str, str | None] | None:
        """A parameter that the tensor goes to, and the pattern of a converter that takes it.

        None if the module has no use for it.
        """
        for known_name in (tensor_name, _TEXT_PREFIX.sub("", tensor_name)):
            for steps in ((self._renamings, self._converters), ([], [])):
                name, pattern = rename_source_key(known_name, *steps, self._prefix, self._places)
                if name in self._places:
                    return name, pattern
        return None

    def converter_of(self, pattern: str) -> WeightConverter:
        """The converter that takes tensors of a pattern."""
        return next(c for c in reversed(self._converters) if pattern in c.source_patterns)


def _conversions(
    module: nn.Module, places: Mapping[str, Tensor], tensor_names: Iterable[str]
) -> dict[str, _Conversion | str]:
    """What makes each parameter: a tensor, or the conversion whose first result it is."""
    renaming = _Renaming(module, places)
    found: dict[str, _Conversion | str] = {}
    for tensor_name in sorted(tensor_names, key=dot_natural_key):
        place = renaming.place_of(tensor_name)
        if place is None:
            continue
        name, pattern = place
        if pattern is None:
            found.setdefault(name, tensor_name)
            continue
        conversion = found.setdefault(
            name, _Conversion(module, renaming.converter_of(pattern), name)
        )
        if isinstance(conversion, _Conversion):
            conversion.names_by_pattern.setdefault(pattern, []).append(tensor_name)
    return found


class _RowTracer:
    """Finds which rows of file tensors a conversion puts where."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, TensorSpan]) -> None:
        self._tensors = tensors
        self._narrow_module = _NarrowModule(module)
        self._rows_by_kind: dict[Any, list[tuple[InputRows, ...] | None]] = {}

    def trace(
        self, first_name: str, conversion: _Conversion | str
    ) -> dict[str, tuple[torch.Size, tuple[RowRun, ...] | None]]:
        """The shape of each parameter that it makes, and the rows that it is.

        Raises:
            CheckpointCorrupt: The tensors do not fit together.
        """
        names = _tensor_names(conversion)
        shapes = [torch.Size(self._tensors[name].shape) for name in names]
        if isinstance(conversion, str):
            whole = RowRun(tensor_name=conversion, begin_row=0, end_row=shapes[0][:-1].numel())
            return {first_name: (shapes[0], (whole,))}
        try:
            outputs = conversion.run(
                {n: torch.empty(s, device="meta") for n, s in zip(names, shapes, strict=True)}
            )
        except (RuntimeError, ValueError, LookupError) as error:
            raise CheckpointCorrupt(
                f"tensors of {first_name} do not fit together ({', '.join(names[:4])}): {error}"
            ) from None
        output_shapes = [output.shape for output in outputs.values()]
        rows = self._rows(conversion, names, shapes, output_shapes)
        return {
            name: (shape, None if parts is None else _named(parts, names))
            for name, shape, parts in zip(outputs, output_shapes, rows, strict=True)
        }

    def _rows(
        self,
        conversion: _Conversion,
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        output_shapes: Sequence[torch.Size],
    ) -> list[tuple[InputRows, ...] | None]:
        """The rows of each output; found once for layers that are alike."""
        kind = (id(conversion.converter), tuple(shapes), tuple(output_shapes))
        if kind not in self._rows_by_kind:

            def rearrange(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
                named = dict(zip(names, inputs, strict=True))
                return list(conversion.run(named, self._narrow_module).values())

            self._rows_by_kind[kind] = trace_rows(rearrange, shapes, output_shapes)
        return self._rows_by_kind[kind]


class _NarrowModule:
    """A module whose matrices have few columns, for operations that ask for their shape."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get_parameter(self, name: str) -> Tensor:
        parameter = self._module.get_parameter(name)
        return torch.empty(narrow(parameter.shape), dtype=parameter.dtype, device="meta")


def _named(rows: Iterable[InputRows], names: Sequence[str]) -> tuple[RowRun, ...]:
    return tuple(
        RowRun(tensor_name=names[part.input_index], begin_row=part.begin_row, end_row=part.end_row)
        for part in rows
    )
