"""What a running request tells its reader."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one choice."""

    index: int
    """Which choice."""
    step_index: int
    text: str
    """May be empty: text that may become a stop string is held back."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """Set on the last delta of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the whole request took; the last event."""

    prompt_tokens: int
    completion_tokens: int
    """Over all choices; an end-of-sequence token counts."""
    num_steps: int
    acceptance_histogram: tuple[int, ...]
    """[gamma + 1] entry k counts the steps with a proposal of which k tokens were accepted."""
    num_draft_tokens: int
    num_rejecting_steps: int
    """Steps in which a draft token was rejected."""
    num_sweeps: int
    bytes_streamed: int
    sweep_ns: int
    ttft_s: float
    """From the request's acceptance to its first token."""
    duration_s: float
    """From the request's acceptance to its last token."""

    @property
    def num_spec_steps(self) -> int:
        """Steps that checked a proposal."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens that survived the test."""
        return sum(k * count for k, count in enumerate(self.acceptance_histogram))

    @property
    def acceptance_rate(self) -> float:
        """Chance that a draft token is accepted given all before it were: alpha."""
        return _ratio(self.num_accepted_tokens, self.num_accepted_tokens + self.num_rejecting_steps)

    @property
    def draft_acceptance_ratio(self) -> float:
        """Accepted over drafted tokens."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens of a mean step with a proposal."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_spec_steps)

    @property
    def block_efficiency(self) -> float:
        """Output tokens of a mean step."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_steps)

    @property
    def stream_gb_per_s(self) -> float:
        """Weights read from storage over the time of the sweeps; bytes per ns are GB per s."""
        return _ratio(self.bytes_streamed, self.sweep_ns)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all choices over the whole duration."""
        return _ratio(self.completion_tokens, self.duration_s)


Event = Delta | Summary


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
