"""Packed linear layers against torch's own."""

import copy

import pytest
import torch
from torch import nn

from headrace.model.packed_linear import pack_linear_layers


def make_layers(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(48, 80, bias=True), nn.Linear(80, 24, bias=False))
    return layers.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 65])
def test_products_are_the_same_numbers(num_tokens: int) -> None:
    layers = make_layers()
    plain = copy.deepcopy(layers)
    pack_linear_layers(layers)
    x = torch.randn(1, num_tokens, 48, dtype=torch.bfloat16)
    assert torch.equal(layers(x), plain(x))


def test_the_weights_are_there_once() -> None:
    layers = make_layers()
    pack_linear_layers(layers)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 products")
    assert [layer.weight.device.type for layer in layers] == ["meta", "meta"]


def test_shared_weights_stay_as_they_are() -> None:
    embedding = nn.Embedding(16, 8, dtype=torch.bfloat16)
    head = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    pack_linear_layers(nn.ModuleList([embedding, head]))
    assert head.weight is embedding.weight
    assert head.weight.device.type == "cpu"


def test_other_types_stay_as_they_are() -> None:
    layers = make_layers(torch.float32)
    pack_linear_layers(layers)
    assert all(layer.weight.device.type == "cpu" for layer in layers)
