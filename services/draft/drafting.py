"""Draws draft tokens for a batch of sequences. Runs on the compute thread.

Knows nothing of the wire.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.errors import HeadraceError
from headrace.model.batch_loop import Job
from headrace.model.engine import Engine, Slice
from headrace.rng import Purpose, uniform
from headrace.sampling import draw_from_row, probabilities, sparse_row
from headrace.types import Proposal, SparseRow

_MAX_PASS_TOKENS = 256
"""Prompt tokens of one sequence in a forward pass; bounds its memory and what others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The answer to one Propose."""

    proposal: Proposal
    queue_ns: int = 0
    propose_ns: int = 0
    num_sequences: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ProposeJob(Job[Drafted]):
    """One proposal to draw, as it grows."""

    gamma: int
    token_ids: list[int] = field(default_factory=list)
    draft_rows: list[SparseRow] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Committed tokens that have no KV yet."""
        return self.sequence.num_pending

    def next_slice(self) -> Slice:
        """The tokens that the next draw needs: what has no KV yet, or the last draft token."""
        pending = self.sequence.pending_token_ids or self.token_ids[-1:]
        return Slice(kv=self.sequence.kv, token_ids=pending, num_logits=1)

    def finish(self, *, queue_ns: int, propose_ns: int, num_sequences: int) -> None:
        """Answer with what was drawn."""
        self.answer = Drafted(
            proposal=Proposal(token_ids=tuple(self.token_ids), draft_rows=tuple(self.draft_rows)),
            queue_ns=queue_ns,
            propose_ns=propose_ns,
            num_sequences=num_sequences,
        )
        self.sequence.last_step_index = self.step_index
        self.sequence.last_answer = self.answer

    def roll_back(self) -> None:
        """Forget the KV of draft tokens that will never be sent."""
        sequence = self.sequence
        sequence.kv.truncate(min(sequence.kv.length, len(sequence.token_ids) - 1))
        sequence.last_answer = None


class Drafter:
    """Runs the draft model."""

    def __init__(self, engine: Engine, *, num_tokens: int, max_row_tokens: int) -> None:
        """Prepare to draft.

        Args:
            engine: The draft model.
            num_tokens: Ids that stand for a token lie below it; padding rows are never drawn.
            max_row_tokens: Longest draft row that is sent. A shorter row costs acceptance, never
                exactness: it is cut before the draw.
        """
        self._engine = engine
        self._num_tokens = num_tokens
        self._max_row_tokens = max_row_tokens

    def run(self, jobs: Sequence[ProposeJob]) -> None:
        """Draw the proposals: one forward pass for each draft token, all jobs together.

        Jobs whose prompt is too long for one pass stay pending; the first of them advances by a
        chunk, so that nobody waits for a whole prompt of somebody else.
        """
        long = [job for job in jobs if job.gamma > 0 and job.num_pending > _MAX_PASS_TOKENS]
        ready = [job for job in jobs if job not in long]
        if ready:
            self._propose(ready)
        if long:
            sequence = long[0].sequence
            chunk = sequence.pending_token_ids[:_MAX_PASS_TOKENS]
            self._engine.forward([Slice(kv=sequence.kv, token_ids=chunk, num_logits=0)])

    def _propose(self, jobs: Sequence[ProposeJob]) -> None:
        began_ns = time.perf_counter_ns()
        try:
            self._draw_all([job for job in jobs if job.gamma > 0])
            propose_ns = time.perf_counter_ns() - began_ns
            for job in jobs:
                if job.error is None:
                    job.finish(
                        queue_ns=began_ns - job.submitted_ns,
                        propose_ns=propose_ns,
                        num_sequences=len(jobs),
                    )
        finally:
            for job in jobs:
                if job.answer is None:
                    job.roll_back()

    def _draw_all(self, jobs: Sequence[ProposeJob]) -> None:
        drawing = jobs
        while drawing:
            logits = self._engine.forward([job.next_slice() for job in drawing])
            for job, rows in zip(drawing, logits, strict=True):
                self._draw(job, rows[0])
            drawing = [
                job for job in drawing if job.error is None and len(job.token_ids) < job.gamma
            ]

    def _draw(self, job: ProposeJob, logits: Tensor) -> None:
        """Draw one token from exactly the row that will be sent.

        Args:
            job: Whose next token it is.
            logits: [V] float32.
        """
        sampling = job.sequence.sampling
        try:
            probs = probabilities(logits[: self._num_tokens], sampling)
        except HeadraceError as error:
            job.error = error
            return
        row = sparse_row(probs, self._max_row_tokens)
        position = len(job.sequence.token_ids) + len(job.token_ids)
        job.token_ids.append(draw_from_row(row, uniform(sampling.seed, position, Purpose.DRAFT)))
        job.draft_rows.append(row)
