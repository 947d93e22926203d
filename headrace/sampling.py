"""From logits to probabilities to a token: the one definition that draft and target both use.

Temperature, then top-k, then top-p, as transformers' own warpers define them. Among equals the
lower token id comes first, always, so that a row never depends on a sort's whims. Greedy is a row
that is one-hot on the first largest logit, so that nothing after it needs to know.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import NonFiniteLogits
from headrace.types import SamplingParams, SparseRow

_FIRST_TOP_P_TOKENS = 1024
"""Top-p rarely reaches further: sorting a whole vocabulary costs milliseconds a row."""

_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below it a float32 division gives NaN; at it the row is one-hot already, ties aside."""


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
    scaled = (logits - largest) / max(sampling.temperature, _MIN_TEMPERATURE)
    if 0 < sampling.top_k < scaled.numel():
        kept = _largest(scaled, sampling.top_k)
        scaled = torch.full_like(scaled, float("-inf")).index_copy(0, kept, scaled[kept])
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
    cumulative = probs.cumsum(dtype=np.float64)
    index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    # No double below 1 times the sum rounds up to the sum, so some entry always lies above.
    assert index < cumulative.size, "a row to draw from needs a positive, finite sum"
    return index


def sparse_row(probs: Tensor, max_tokens: int) -> SparseRow:
    """The most probable tokens of a row, renormalised: what a draft token is then drawn from.

    Args:
        probs: [V] float32.
        max_tokens: Length of the result at most.

    Returns:
        Its tokens by falling probability.
    """
    token_ids = _largest(probs, min(max_tokens, probs.numel()))
    token_ids = token_ids[probs[token_ids] > 0]
    kept = probs[token_ids]
    return SparseRow(token_ids=token_ids.numpy(), probs=(kept / kept.sum()).numpy())


def draw_from_row(row: SparseRow, uniform: float) -> int:
    """The token that a uniform number in [0, 1) picks from a sparse row."""
    return int(row.token_ids[draw(row.probs, uniform)])


def _keep_top_p(row: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose mass reaches top_p, at least one."""
    token_ids = _largest(row, min(_FIRST_TOP_P_TOKENS, row.numel()))
    if float(row[token_ids].sum(dtype=torch.float64)) < top_p:
        token_ids = _largest(row, row.numel())
    mass = row[token_ids].double()
    mass_before = mass.cumsum(0) - mass
    is_kept = mass_before < top_p
    is_kept[0] = True
    kept = token_ids[is_kept]
    result = torch.zeros_like(row)
    result[kept] = row[kept]
    return result / result.sum()


def _largest(values: Tensor, count: int) -> Tensor:
    """[count] indices of the largest values, falling; among equals the lower index comes first.

    Args:
        values: [V].
        count: 1 to V.
    """
    if count == values.numel():
        return values.sort(descending=True, stable=True).indices
    # topk is far cheaper than a sort, but which of several equals it takes is not defined.
    smallest = values.topk(count).values[-1]
    above = (values > smallest).nonzero()[:, 0]
    equal = (values == smallest).nonzero()[: count - above.numel(), 0]
    indices = torch.cat([above, equal])
    return indices[values[indices].sort(descending=True, stable=True).indices]
