"""From logits to probabilities to a token: the one definition that draft and target both use.

Temperature, then top-k, then top-p, as transformers' own warpers define them. Greedy is a row that
is one-hot on the first largest logit, so that nothing after it needs to know.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import NonFiniteLogits
from headrace.types import SamplingParams, SparseRow

_FIRST_TOP_P_TOKENS = 1024
"""Top-p rarely reaches further: sorting a whole vocabulary costs milliseconds a row."""


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The row that a token is drawn from.

    Args:
        logits: [V] of any float type; single entries may be -inf.
        sampling: Temperature, top_k and top_p.

    Returns:
        [V] float32, sums to 1.

    Raises:
        NonFiniteLogits: There is a NaN or +inf, or nothing but -inf.
    """
    logits = logits.float()
    largest = logits.max()  # NaN when any is
    if not torch.isfinite(largest):
        raise NonFiniteLogits("the model's output is not a finite number")
    if sampling.temperature == 0.0:
        row = torch.zeros_like(logits)
        row[logits.argmax()] = 1.0
        return row
    # The largest becomes 0, so that no temperature can overflow.
    scaled = (logits - largest) / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        smallest_kept = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest_kept, float("-inf"))
    row = scaled.softmax(-1)
    return row if sampling.top_p == 1.0 else _keep_top_p(row, sampling.top_p)


def draw(probs: NDArray[np.floating], uniform: float) -> int:
    """The index that a uniform number picks: inverse CDF, in float64.

    Args:
        probs: [N] not negative, with a positive sum; need not be normalised.
        uniform: In [0, 1).

    Returns:
        Index of a positive entry.
    """
    cumulative = np.cumsum(probs, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    if index == cumulative.size:  # rounded up to the very end
        index = int(np.flatnonzero(probs)[-1])
    return index


def sparse_row(probs: Tensor, max_tokens: int) -> SparseRow:
    """The most probable tokens of a row, renormalised: what a draft token is then drawn from.

    Args:
        probs: [V] float32.
        max_tokens: Length of the result at most.

    Returns:
        Its tokens by falling probability.
    """
    largest = probs.topk(min(max_tokens, probs.numel()))
    is_positive = largest.values > 0
    kept = largest.values[is_positive]
    return SparseRow(
        token_ids=largest.indices[is_positive].numpy(), probs=(kept / kept.sum()).numpy()
    )


def draw_from_row(row: SparseRow, uniform: float) -> int:
    """The token that a uniform number in [0, 1) picks from a sparse row."""
    return int(row.token_ids[draw(row.probs, uniform)])


def _keep_top_p(row: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose mass reaches top_p, at least one."""
    num_sorted = min(_FIRST_TOP_P_TOKENS, row.numel())
    probs, token_ids = row.topk(num_sorted)
    if num_sorted < row.numel() and float(probs.sum(dtype=torch.float64)) < top_p:
        probs, token_ids = row.sort(descending=True)
    mass_before = probs.cumsum(0, dtype=torch.float64) - probs
    is_kept = mass_before < top_p
    is_kept[0] = True
    kept = token_ids[is_kept]
    result = torch.zeros_like(row)
    result[kept] = row[kept]
    return result / result.sum()
