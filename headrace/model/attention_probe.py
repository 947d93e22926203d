"""Asks a decoder what its attention stores for a token, by one pass that computes nothing.

The pass runs on the meta device, so it needs no weights and no memory; it also shows whether every
layer's attention can be served at all, before the first request does.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.model.attention_interface import MaskRule, PackedPass, ScoreRule
from headrace.model.kv_cache import LayerKVShape


class AttentionProbe(PackedPass):
    """A pass of one token that notes the shapes of keys and values."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1, dtype=torch.int64, device="meta"))
        self.shapes: dict[int, LayerKVShape] = {}

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask_rule: MaskRule,
        score_rule: ScoreRule,
    ) -> Tensor:
        """See PackedPass."""
        if layer_index in self.shapes:
            raise ConfigError(f"its layer {layer_index} has attention of two kinds")
        self.shapes[layer_index] = LayerKVShape(
            num_heads=key.shape[0], key_dim=key.shape[2], value_dim=value.shape[2]
        )
        return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


@torch.inference_mode()
def probe_kv_shapes(module: Any, num_layers: int) -> list[LayerKVShape]:
    """What each layer stores for one token.

    Args:
        module: A transformers decoder whose parameters are on the meta device.
        num_layers: How many layers it should have.

    Returns:
        [L].

    Raises:
        ConfigError: A layer's attention cannot be served; the message says why.
    """
    probe = AttentionProbe()
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    shadow = copy.deepcopy(module).to("meta")  # a pass may leave traces in a module
    shadow.set_experts_implementation("batched_mm")  # the one that looks at no values
    try:
        shadow(input_ids=token, position_ids=token, use_cache=False, ragged_batch=probe)
    except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
        raise ConfigError(f"its layers cannot run on packed sequences ({error})") from error
    without = sorted(set(range(num_layers)) - probe.shapes.keys())
    if without:
        raise ConfigError(f"its layer {without[0]} does not take transformers' attention interface")
    return [probe.shapes[index] for index in range(num_layers)]
