"""One choice of one request: its tokens, its text and where it ends. Pure."""

from collections.abc import Collection
from collections.abc import Sequence as Tokens

from gateway.detokenizer import Decode, Detokenizer
from gateway.events import Delta, FinishReason
from gateway.spec import GenerationSpec
from gateway.stop_strings import StopStrings
from headrace.types import SamplingParams


class Sequence:
    """A sequence grows by a block of output tokens a step, and ends itself."""

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        sequence_id: str,
        index: int,
        sampling: SamplingParams,
        decode: Decode,
        eos_token_ids: Collection[int],
    ) -> None:
        """Begin with the prompt.

        Args:
            spec: The request.
            sequence_id: Unique over all gateways.
            index: Which choice of the request.
            sampling: The request's, with this choice's own seed.
            decode: Text of some tokens, without special ones.
            eos_token_ids: Tokens that end a sequence, unless the request ignores them.
        """
        self.sequence_id = sequence_id
        self.index = index
        self.sampling = sampling
        self.token_ids = list(spec.prompt_token_ids)
        """Prompt and output."""
        self.max_length = len(spec.prompt_token_ids) + spec.max_tokens
        self.step_index = 0
        """Number of the step to come."""
        self.finish_reason: FinishReason | None = None
        self._max_gamma = spec.gamma
        self._eos_token_ids = frozenset() if spec.ignore_eos else frozenset(eos_token_ids)
        self._detokenizer = Detokenizer(decode)
        self._stop_strings = StopStrings(spec.stop)

    @property
    def gamma(self) -> int:
        """Draft tokens worth asking for: the target itself adds the last token that is wanted."""
        return min(self._max_gamma, self.max_length - len(self.token_ids) - 1)

    def advance(self, output_token_ids: Tokens[int]) -> Delta:
        """Take a step's output tokens, up to the one that ends the sequence; drop the rest.

        Returns:
            The tokens that were taken and the text that they release.
        """
        taken: list[int] = []
        text = ""
        for token_id in output_token_ids:
            taken.append(token_id)
            self.token_ids.append(token_id)
            text += self._take(token_id)
            if self.finish_reason is not None:
                break
        delta = Delta(
            index=self.index,
            step_index=self.step_index,
            text=text,
            token_ids=tuple(taken),
            finish_reason=self.finish_reason,
        )
        self.step_index += 1
        return delta

    def _take(self, token_id: int) -> str:
        """The text that one token releases; sets finish_reason when it is the last."""
        if token_id in self._eos_token_ids:
            self.finish_reason = "stop"
            return self._flush()
        text, is_stopped = self._stop_strings.push(self._detokenizer.push(token_id))
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_length:
            self.finish_reason = "length"
            text += self._flush()
        return text

    def _flush(self) -> str:
        text, is_stopped = self._stop_strings.push(self._detokenizer.flush())
        if is_stopped:
            self.finish_reason = "stop"
            return text
        return text + self._stop_strings.flush()
