"""The values that the processes exchange. Knows neither torch nor gRPC.

Accepted token: a draft token that survived the test. Recovered token: drawn from the residual
after the first rejection. Bonus token: drawn from the target when every draft token was accepted.
Output tokens: the accepted ones, then the recovered or the bonus token.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InvalidRequest, ShapeMismatch

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence turns logits into probabilities; draft and target apply the same values."""

    temperature: float = 1.0
    """0 is greedy: the row is one-hot on the largest logit."""
    top_k: int = 0
    """Keep the largest top_k logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose mass reaches top_p; 1 keeps all."""
    seed: int = 0
    """Key of this sequence's random streams, 0 to 2^64 - 1."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise InvalidRequest("temperature must be between 0 and 100", param="temperature")
        if self.top_k < 0:
            raise InvalidRequest("top_k must be 0 (off) or positive", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p must be in (0, 1]", param="top_p")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequest("seed must be between 0 and 2^64 - 1", param="seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRow:
    """A probability row over the vocabulary; tokens not listed have probability 0."""

    token_ids: NDArray[np.int64]
    """[N] distinct token ids."""
    probs: NDArray[np.float32]
    """[N] positive, summing to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Draft tokens of one sequence with the rows they were drawn from."""

    token_ids: tuple[int, ...] = ()
    """[G] a chain of draft tokens."""
    draft_rows: tuple[SparseRow, ...] = ()
    """[G] row i is exactly what token_ids[i] was drawn from."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.draft_rows):
            raise ShapeMismatch(
                f"{len(self.token_ids)} draft tokens came with {len(self.draft_rows)} rows"
            )

    @property
    def gamma(self) -> int:
        """Number of draft tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Where the time of one step went, and what its last sweep carried."""

    queue_ns: int = 0
    sweep_ns: int = 0
    stall_ns: int = 0
    forward_ns: int = 0
    accept_ns: int = 0
    bytes_streamed: int = 0
    num_sweeps: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    sweep_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The target's answer to one proposal."""

    step_index: int
    num_accepted: int
    """k, 0 to G."""
    output_token_ids: tuple[int, ...]
    """[k + 1] accepted tokens, then the recovered or the bonus token."""
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model process serves."""

    name: str
    vocab_size: int
    """Rows of the model's output; may exceed the tokenizer's vocabulary by padding."""
    max_context_tokens: int
    tokenizer_fingerprint: str
    """Hash of the tokenizer's vocabulary; draft and target must agree."""
    num_layers: int
    kv_capacity_tokens: int
    streamed_bytes_per_sweep: int = 0
    """Weight bytes on disk that one sweep visits; 0 when they are resident."""
