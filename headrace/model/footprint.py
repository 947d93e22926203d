"""What a model needs memory for, worked out without reading a weight."""

from headrace.envelope import Demand, DraftDemand
from headrace.model.decoder import Decoder

_LOGITS_COPIES = 3
"""Of a row of logits in float32: as computed, as probabilities, as their sorted sums."""
_HIDDEN_COPIES = 8
"""Of a token's hidden state: residual, normalized, queries, keys, values, attended, ..."""
_WIDE_COPIES = 3
"""Of the widest activation of a layer: gate, up, their product."""


def demand_of(decoder: Decoder, draft: Decoder | None) -> Demand:
    """The memory that a target and its draft need."""
    return Demand(
        plan_for=lambda unit_bytes: decoder.plan(unit_bytes=unit_bytes),
        always_resident_bytes=decoder.always_resident_bytes,
        weight_bytes=decoder.weight_bytes,
        kv_token_bytes=_kv_token_bytes(decoder),
        workspace_token_bytes=_workspace_token_bytes(decoder),
        max_context_tokens=decoder.unbound.max_context_tokens,
        draft=None
        if draft is None
        else DraftDemand(weight_bytes=draft.weight_bytes, kv_token_bytes=_kv_token_bytes(draft)),
    )


def _kv_token_bytes(decoder: Decoder) -> int:
    num_values = sum(
        shape.num_heads * (shape.key_dim + shape.value_dim) for shape in decoder.unbound.kv_shapes()
    )
    return num_values * decoder.unbound.dtype.itemsize


def _workspace_token_bytes(decoder: Decoder) -> int:
    hidden_size: int = decoder.unbound.config.hidden_size
    widest = max(decoder.widest_activation, hidden_size)
    activations = _HIDDEN_COPIES * hidden_size + _WIDE_COPIES * widest
    logits_bytes = _LOGITS_COPIES * 4 * decoder.unbound.vocab_size
    return activations * decoder.unbound.dtype.itemsize + logits_bytes
