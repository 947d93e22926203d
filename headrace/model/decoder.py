"""A decoder without weights, the order in which it uses them, and the ways to give them to it."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.model.attention import RaggedBatch, Span
from headrace.model.checkpoint import Checkpoint, TensorSpan
from headrace.model.conversion import ParameterSource, parameter_sources
from headrace.model.device import CPU
from headrace.model.dtypes import torch_dtype
from headrace.model.formats import float8
from headrace.model.integrity import Integrity
from headrace.model.kv_cache import KVCache
from headrace.model.module import UnboundModule
from headrace.model.operations.catalog import embeddings_of, operations_of, pieces_of
from headrace.model.operations.embedding import EmbeddingRows
from headrace.model.operations.linear import LinearOperation
from headrace.model.operations.operation import Operation, WeightSource
from headrace.model.packed_linear import pack_linear_layers
from headrace.model.sweep_plan import Piece, SweepPlan
from headrace.model.tensor_reads import read_piece, read_tensors

_RESIDENT_UNIT_BYTES = 32 << 20
"""Of weights that all stay: the size means nothing but how finely they are cut."""


class Decoder:
    """A model of a checkpoint; its weights stay in the files until they are asked for."""

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device = CPU) -> None:
        """Build the module and find every parameter in the checkpoint.

        Args:
            checkpoint: The model.
            device: Where it computes, and where weights that stay are.

        Raises:
            ConfigError: The architecture is not supported.
            CheckpointCorrupt: Tensors are missing or have another shape, or another size than
                the manifest says.
        """
        self.checkpoint = checkpoint
        self.device = device
        self._integrity = Integrity(checkpoint)
        self.unbound = UnboundModule(checkpoint.directory)
        self._sources = parameter_sources(self.module, checkpoint.tensors)
        self._check_types()

    @property
    def module(self) -> nn.Module:
        """The Hugging Face model."""
        module: nn.Module = self.unbound.module
        return module

    def load(self) -> None:
        """Read all weights, to stay; packed ones stay packed."""
        if self._is_packed:
            plan = self.plan(unit_bytes=_RESIDENT_UNIT_BYTES)
            self.stream(plan.keeping(plan.streamed_bytes), None)
        else:
            self._load(self._sources)
            self.unbound.move_buffers(self.device)
            if self.device.type == "cpu":
                pack_linear_layers(self.module)

    def plan(self, *, unit_bytes: int) -> SweepPlan:
        """Cut a sweep into units of about unit_bytes."""
        uses = [use for operation in self._in_order for use in operation.uses()]
        return SweepPlan.pack(uses, unit_bytes=unit_bytes)

    def stream(self, plan: SweepPlan, weights: WeightSource | None) -> None:
        """Borrow what the plan streams, read the rest to stay.

        Embeddings are neither: their rows are read as tokens need them.

        Args:
            plan: One that `plan` made.
            weights: Lends what is streamed; None where nothing is.
        """
        source = _PartlyResident(plan, weights, self._read_piece)
        next_use = 0
        for operation in self._in_order:
            end = next_use + len(operation.uses())
            operation.borrow(plan.pieces_by_use[next_use:end], source)
            next_use = end
        by_row = self._embeddings_by_row()
        for name, embedding in by_row.items():
            runs = self._sources[name].runs
            assert runs is not None
            pieces = pieces_of(runs, self.checkpoint.tensors)
            EmbeddingRows(
                embedding, pieces, self._integrity, dtype=self.unbound.dtype, device=self.device
            )
        self._load(self._always_resident)
        self.unbound.move_buffers(self.device)

    @property
    def weight_bytes(self) -> int:
        """Of all weights, once they are in memory."""
        return self._num_bytes(self._sources)

    @property
    def widest_activation(self) -> int:
        """Outputs of the widest linear layer but the last."""
        head = self.unbound.module.get_output_embeddings()
        return max(
            (
                m.out_features
                for m in self.module.modules()
                if isinstance(m, nn.Linear) and m is not head
            ),
            default=0,
        )

    @property
    def always_resident_bytes(self) -> int:
        """Weights that stay in memory whatever is streamed: norms, biases and the like."""
        return self._num_bytes(self._always_resident)

    @property
    def _always_resident(self) -> set[str]:
        borrowed = {name for operation in self._in_order for name in operation.parameter_names}
        return self._sources.keys() - borrowed - self._embeddings_by_row().keys()

    @property
    def _is_packed(self) -> bool:
        return any(map(float8.is_float8, self._spans_in_use()))

    def _num_bytes(self, names: Iterable[str]) -> int:
        """Of parameters in memory; tied ones share a source and count once."""
        distinct = {id(self._sources[name]): self._sources[name] for name in names}
        return sum(
            source.shape.numel() * self._element_bytes(source) for source in distinct.values()
        )

    def _element_bytes(self, source: ParameterSource) -> int:
        spans = [self.checkpoint.tensors[name] for name in source.tensor_names]
        return 1 if any(map(float8.is_float8, spans)) else source.dtype.itemsize

    def _spans_in_use(self) -> list[TensorSpan]:
        names = {name for source in self._sources.values() for name in source.tensor_names}
        return [self.checkpoint.tensors[name] for name in sorted(names)]

    def _check_types(self) -> None:
        """Refuse now what cannot be used later."""
        for span in self._spans_in_use():
            torch_dtype(span.dtype)
        linear = {
            name
            for operation in self._operations.values()
            if isinstance(operation, LinearOperation)
            for name in operation.parameter_names
        }
        for name in self._sources.keys() - linear:
            for tensor_name in self._sources[name].tensor_names:
                if float8.is_float8(self.checkpoint.tensors[tensor_name]):
                    raise ConfigError(
                        f"tensor {tensor_name} is float8, which only the weights of linear layers "
                        "may be"
                    )

    def _embeddings_by_row(self) -> dict[str, nn.Embedding]:
        return {
            name: embedding
            for name, embedding in embeddings_of(self.module).items()
            if self._sources[name].runs is not None
        }

    def _load(self, names: Iterable[str]) -> None:
        """Read parameters into memory of their own and bind them."""
        identities = {
            name: id(parameter)
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }
        bound: set[int] = set()
        for name in sorted(names):
            identity = identities.get(name)
            if identity not in bound:  # tied parameters are bound together
                source = self._sources[name]
                spans = [self.checkpoint.tensors[n] for n in source.tensor_names]
                parameter = source.assemble(read_tensors(spans, self._integrity))
                self.unbound.bind({name: parameter.to(self.device)})
            if identity is not None:
                bound.add(identity)

    def _read_piece(self, piece: Piece) -> Tensor:
        return read_piece(piece, self._integrity).to(self.device)

    @cached_property
    def _operations(self) -> dict[str, Operation]:
        return operations_of(self.module, self._sources, self.checkpoint.tensors)

    @cached_property
    def _in_order(self) -> list[Operation]:
        """The operations whose weights a sweep borrows, in the order of their use.

        Found by one forward pass of a copy that computes nothing: every large operation gives zeros
        and notes that its turn had come. A module that is not used exactly once keeps its weights.
        """
        calls = _record_calls(self.unbound, self._sources, self.checkpoint.tensors)
        counts = Counter(calls)
        return [self._operations[name] for name in calls if counts[name] == 1]


class _PartlyResident:
    """Adds the units that stay in memory to those that are lent."""

    def __init__(
        self, plan: SweepPlan, weights: WeightSource | None, read: Callable[[Piece], Tensor]
    ) -> None:
        self._weights = weights
        self.read = read
        """See Weights."""
        self._resident: dict[int, Tensor] = {}
        for unit_index in plan.resident_units:
            unit = plan.units[unit_index]
            for index, piece in enumerate(unit.pieces, start=unit.first_piece):
                self._resident[index] = self.read(piece)

    def acquire(self, piece_index: int) -> Tensor:
        """See WeightSource."""
        tensor = self._resident.get(piece_index)
        if tensor is not None:
            return tensor
        assert self._weights is not None
        return self._weights.acquire(piece_index)

    def release(self, piece_index: int) -> None:
        """See WeightSource."""
        if piece_index not in self._resident:
            assert self._weights is not None
            self._weights.release(piece_index)


@torch.inference_mode()
def _record_calls(
    unbound: UnboundModule,
    sources: Mapping[str, ParameterSource],
    tensors: Mapping[str, TensorSpan],
) -> list[str]:
    """Names of the modules of operations as a forward pass calls them."""
    module = copy.deepcopy(unbound.module)
    calls: list[str] = []
    for name, operation in operations_of(module, sources, tensors).items():
        operation.record(_noting(calls, name))
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            owner._parameters[attribute] = zeros
    shapes = unbound.kv_shapes()
    cache = KVCache(shapes, num_blocks=1, block_size=1, dtype=unbound.dtype, device=CPU)
    module(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        position_ids=torch.zeros(1, 1, dtype=torch.int64),
        use_cache=False,
        ragged_batch=RaggedBatch(cache, [Span(cache.open(1), 1, device=CPU)]),
    )
    return calls


def _noting(calls: list[str], name: str) -> Callable[[], None]:
    return lambda: calls.append(name)
