"""The live sequences of a model process: their committed tokens and their KV.

A table is a cache of what the gateway knows: any sequence can be opened again from its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.errors import InvalidRequest, UnknownSequence
from headrace.model.kv_cache import KVCache, KVSequence
from headrace.types import SamplingParams

Answer = TypeVar("Answer")


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSequence(Generic[Answer]):
    """One sequence; token_ids[kv.length:] have no KV yet."""

    sequence_id: str
    token_ids: list[int]
    """Committed tokens, prompt included."""
    sampling: SamplingParams
    max_length: int
    kv: KVSequence
    last_used_s: float
    last_step_index: int = -1
    last_answer: Answer | None = None
    """To the last step, kept so that a repeated call gets the same one."""

    @property
    def num_pending(self) -> int:
        """Committed tokens that have no KV yet."""
        return len(self.token_ids) - self.kv.length

    @property
    def pending_token_ids(self) -> list[int]:
        """[num_pending] the tokens themselves."""
        return self.token_ids[self.kv.length :]


class SequenceTable(Generic[Answer]):
    """Live sequences by id."""

    def __init__(self, cache: KVCache, *, vocab_size: int, max_context_tokens: int) -> None:
        """Begin empty.

        Args:
            cache: Where the sequences keep their KV.
            vocab_size: Token ids lie below it.
            max_context_tokens: Longest sequence.
        """
        self._cache = cache
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._sequences: dict[str, LiveSequence[Answer]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def open(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        max_length: int,
        now_s: float,
    ) -> None:
        """Register a sequence; one of the same id is replaced.

        Raises:
            InvalidRequest: No tokens, a token outside the vocabulary, or longer than the context.
            KVExhausted: No blocks are free now.
        """
        if not token_ids:
            raise InvalidRequest("a sequence needs at least one token", param="prompt")
        self.check_token_ids(token_ids)
        if not len(token_ids) <= max_length <= self._max_context_tokens:
            raise InvalidRequest(
                f"{len(token_ids)} tokens growing to {max_length} do not fit the context of "
                f"{self._max_context_tokens} tokens",
                param="max_tokens",
            )
        self.close(sequence_id)
        self._sequences[sequence_id] = LiveSequence(
            sequence_id=sequence_id,
            token_ids=list(token_ids),
            sampling=sampling,
            max_length=max_length,
            kv=self._cache.open(max_length),
            last_used_s=now_s,
        )

    def get(self, sequence_id: str, *, now_s: float) -> LiveSequence[Answer]:
        """The sequence of that id.

        Raises:
            UnknownSequence: It was never opened, or closed since.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequence("no such sequence here: open it again from its tokens")
        sequence.last_used_s = now_s
        return sequence

    def close(self, sequence_id: str) -> None:
        """Free a sequence, if it is there."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._cache.close(sequence.kv)

    def idle_since(self, before_s: float) -> Iterable[str]:
        """Ids of sequences that nobody used since then."""
        return [i for i, s in self._sequences.items() if s.last_used_s < before_s]

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse token ids outside the vocabulary."""
        if token_ids and max(token_ids) >= self._vocab_size:
            raise InvalidRequest(
                f"token id {max(token_ids)} is outside the vocabulary of {self._vocab_size}",
                param="prompt",
            )
