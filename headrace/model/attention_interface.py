"""How decoders call attention here: transformers' attention implementation "headrace".

Decoders hand queries, keys and values to the pass that is under way, with what the model says of
masks and scores. What they say beyond that is refused, never dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from headrace.errors import ConfigError

IMPLEMENTATION = "headrace"

_WITHOUT_EFFECT = frozenset(
    {
        "dropout",  # of training
        "sliding_window", "is_causal",  # the mask rule has them
        "position_ids",  # for kernels that tell packed sequences apart by them
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",  # likewise
        "use_cache", "return_dict",
        "output_attentions", "output_hidden_states", "output_router_logits",
    }
)  # fmt: skip
"""Arguments of attention functions that change no result here."""


class MaskRule:
    """Which positions a token sees by the model's rule: causal, in a sliding window, in chunks."""

    def __init__(self, mask_function: Callable[[int, int, Tensor, Tensor], Tensor]) -> None:
        self._mask_function = mask_function

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """[T, N] bool, for tokens at positions query [T] and key [N]."""
        allowed = self._mask_function(0, 0, query[:, None], key[None, :])
        return allowed.expand(query.numel(), key.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """How a layer weighs what its tokens see."""

    scaling: float
    softcap: float | None
    """Bound of the scores by tanh (gemma2)."""
    sinks: Tensor | None
    """[H] a score for each head that takes weight and gives no value (gpt_oss)."""


class PackedPass(ABC):
    """A forward pass over tokens of several sequences packed as one row.

    It also stands where decoders expect transformers' own cache: that one tells them how many
    positions came before, here another number for each token.
    """

    def __init__(self, positions: Tensor) -> None:
        """Begin a pass.

        Args:
            positions: [T] int64 of each token in its sequence.
        """
        self._num_before = positions - torch.arange(positions.numel(), device=positions.device)

    @abstractmethod
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
        """Attend each token to what it may see of its sequence.

        Args:
            layer_index: Of the decoder layer.
            query: [H, T, D].
            key: [KV heads, T, D].
            value: [KV heads, T, value D].
            mask_rule: The layer's.
            score_rule: The layer's.

        Returns:
            [T, H, value D].
        """

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Give keys and values back as they are; attend gets them."""
        return key, value

    def get_seq_length(self, *_: object) -> Tensor:
        """[T] what to add to a token's index in the row to get its position."""
        return self._num_before

    def get_query_offset(self, *_: object) -> int:
        """Of the mask that decoders would make; a MaskRule needs none."""
        return 0

    def get_mask_sizes(self, num_queries: int, *_: object) -> tuple[int, int]:
        """Of the mask that decoders would make; a MaskRule needs none."""
        return num_queries, 0


_under_way: ContextVar[PackedPass | None] = ContextVar("under_way", default=None)


def begin(packed_pass: PackedPass) -> None:
    """Let the attention of decoders in this thread be that of a pass."""
    _under_way.set(packed_pass)


def end() -> None:
    """End the pass under way."""
    _under_way.set(None)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What decoders call, with transformers' arguments.

    Args:
        module: The attention module.
        query: [1, H, T, D].
        key: [1, KV heads, T, D].
        value: [1, KV heads, T, value D].
        attention_mask: A MaskRule.
        scaling: Of the scores; D ** -0.5 by default.
        softcap: See ScoreRule.
        s_aux: See ScoreRule.sinks.
        others: Only what has no effect.

    Returns:
        [1, T, H, value D], and no attention weights.

    Raises:
        ConfigError: The model's attention takes something else into account.
    """
    unknown = sorted(n for n, v in others.items() if v is not None and n not in _WITHOUT_EFFECT)
    if unknown or not isinstance(attention_mask, MaskRule):
        raise ConfigError("its attention takes " + (", ".join(unknown) or "a mask of its own"))
    packed_pass = _under_way.get()
    assert packed_pass is not None
    attended = packed_pass.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        mask_rule=attention_mask,
        score_rule=ScoreRule(
            scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=s_aux,
        ),
    )
    return attended[None], None


def register() -> None:
    """Make "headrace" known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(
        IMPLEMENTATION, lambda *_, mask_function, **__: MaskRule(mask_function)
    )
