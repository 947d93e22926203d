"""Operations on borrowed weights against torch with whole ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headrace.model.checkpoint import Checkpoint
from headrace.model.conversion import ParameterSource, RowRun
from headrace.model.operations.catalog import operations_of
from headrace.model.operations.operation import Operation
from headrace.model.operations.whole import WholeOperation
from headrace.model.sweep_plan import SweepPlan
from tests.support.lent_weights import LentWeights

MANY_PIECES, ONE_PIECE = 2048, 1 << 20


def stored(directory: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    (directory / "config.json").write_text("{}")
    save_file(dict(tensors), directory / "model.safetensors")
    return Checkpoint.open(directory)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def source(name: str, shape: Sequence[int]) -> ParameterSource:
    num_rows = torch.Size(shape[:-1]).numel()
    run = RowRun(tensor_name=name, begin_row=0, end_row=num_rows)
    return ParameterSource(
        shape=torch.Size(shape), dtype=torch.float32, tensor_names=(name,), runs=(run,)
    )


def borrowing(owner: nn.Module, directory: Path, unit_bytes: int) -> LentWeights:
    """Let an owner of matrices borrow them from a file that holds their present values."""
    model = nn.ModuleDict({"owner": owner})
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    checkpoint = stored(directory, values)
    sources = {name: source(name, value.shape) for name, value in values.items()}
    operation = operations_of(model, sources, checkpoint.tensors)["owner"]
    for name in operation.parameter_names:
        owner._parameters[name.rsplit(".", 1)[-1]] = nn.Parameter(
            torch.empty(values[name].shape, device="meta")
        )
    return lend(operation, unit_bytes)


def lend(operation: Operation, unit_bytes: int) -> LentWeights:
    plan = SweepPlan.pack(operation.uses(), unit_bytes=unit_bytes)
    weights = LentWeights(plan)
    operation.borrow(plan.pieces_by_use, weights)
    weights.begin_sweep()
    return weights


def fill(module: nn.Module) -> None:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * random_tensor(*parameter.shape, seed=seed)


@pytest.mark.parametrize("unit_bytes", [MANY_PIECES, ONE_PIECE])
@pytest.mark.parametrize("has_bias", [True, False])
@torch.inference_mode()
def test_a_linear_layer_in_pieces_equals_torch(
    unit_bytes: int, has_bias: bool, tmp_path: Path
) -> None:
    layer = nn.Linear(40, 100, bias=has_bias)
    fill(layer)
    x = random_tensor(1, 7, 40, seed=9)
    expected = layer(x)
    weights = borrowing(layer, tmp_path, unit_bytes)
    assert len(weights.piece_indices) == (1 if unit_bytes == ONE_PIECE else 7)  # of 16 rows
    assert_close(layer(x), expected, atol=1e-6, rtol=1e-6)
    weights.end_sweep()


def experts(kind: type[nn.Module]) -> nn.Module:
    config = SimpleNamespace(
        num_experts=4,
        num_local_experts=4,
        hidden_size=24,
        moe_intermediate_size=40,
        intermediate_size=40,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )
    module: nn.Module = kind(config)
    fill(module)
    return module


@pytest.mark.parametrize("unit_bytes", [MANY_PIECES, ONE_PIECE])
@pytest.mark.parametrize("kind", [Qwen3MoeExperts, GptOssExperts])
@torch.inference_mode()
def test_borrowed_experts_equal_transformers_though_some_get_no_tokens(
    kind: type[nn.Module], unit_bytes: int, tmp_path: Path
) -> None:
    module = experts(kind)
    hidden = random_tensor(5, 24, seed=9)
    chosen = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])  # never 1 or 3
    shares = random_tensor(5, 2, seed=10).softmax(-1)
    expected = module(hidden, chosen, shares)
    weights = borrowing(module, tmp_path, unit_bytes)
    assert_close(module(hidden, chosen, shares), expected, atol=1e-5, rtol=1e-5)
    weights.end_sweep()


class Failing(nn.Module):
    """Has a matrix and cannot compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no memory")


@torch.inference_mode()
def test_a_module_that_fails_holds_no_borrowed_memory(tmp_path: Path) -> None:
    module = Failing()
    borrowing(module, tmp_path, ONE_PIECE)
    with pytest.raises(RuntimeError, match="no memory"):
        module(torch.ones(1, 8))
    assert module.weight.is_meta


class Sum(nn.Module):
    """Has a stack of matrices whose rows lie in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 3, 8, device="meta"))

    def forward(self) -> Tensor:
        return self.weight.sum(1)


@torch.inference_mode()
def test_a_parameter_made_of_two_tensors_is_put_together_for_each_call(tmp_path: Path) -> None:
    first, second = random_tensor(4, 8, seed=1), random_tensor(2, 8, seed=2)
    checkpoint = stored(tmp_path, {"first": first, "second": second})
    runs = (
        RowRun(tensor_name="first", begin_row=0, end_row=4),
        RowRun(tensor_name="second", begin_row=0, end_row=2),
    )
    parameter = ParameterSource(
        shape=torch.Size([2, 3, 8]),
        dtype=torch.float32,
        tensor_names=("first", "second"),
        runs=runs,
    )
    module = Sum()
    model = nn.ModuleDict({"owner": module})
    operation = operations_of(model, {"owner.weight": parameter}, checkpoint.tensors)["owner"]
    assert isinstance(operation, WholeOperation)
    weights = lend(operation, 64)
    assert_close(module(), torch.cat([first, second]).view(2, 3, 8).sum(1))
    weights.end_sweep()
    assert module.weight.is_meta
