"""Adds up what the steps of one request report. Pure: its caller tells it the time."""

from collections import OrderedDict

from gateway.events import Summary
from headrace.types import StepTimings, Verdict

_MAX_REMEMBERED_SWEEPS = 4_096


class SweepTally:
    """Counts a sweep once, though each sequence that took part in it reports it."""

    def __init__(self) -> None:
        self.num_sweeps = 0
        self.bytes_streamed = 0
        self.sweep_ns = 0
        self.stall_ns = 0
        self._seen: OrderedDict[int, None] = OrderedDict()

    def add(self, timings: StepTimings) -> None:
        """Add the sweeps of one step that are new; a step's figures spread evenly over them."""
        first = timings.sweep_index - timings.num_sweeps + 1
        new = [i for i in range(first, timings.sweep_index + 1) if i not in self._seen]
        if not new:
            return
        share = len(new) / timings.num_sweeps
        self.num_sweeps += len(new)
        self.bytes_streamed += round(timings.bytes_streamed * share)
        self.sweep_ns += round(timings.sweep_ns * share)
        self.stall_ns += round(timings.stall_ns * share)
        self._seen.update(dict.fromkeys(new))
        while len(self._seen) > _MAX_REMEMBERED_SWEEPS:
            self._seen.popitem(last=False)


class Figures:
    """The running totals of one request."""

    def __init__(self, *, prompt_tokens: int, max_gamma: int, start_s: float) -> None:
        """Begin.

        Args:
            prompt_tokens: Counted once, whatever the number of choices.
            max_gamma: Draft tokens of a step at most.
            start_s: When the request was accepted.
        """
        self._prompt_tokens = prompt_tokens
        self._start_s = start_s
        self._first_token_s = start_s
        self._last_token_s = start_s
        self._completion_tokens = 0
        self._num_steps = 0
        self._histogram = [0] * (max_gamma + 1)
        self._num_draft_tokens = 0
        self._num_rejecting_steps = 0
        self._sweeps = SweepTally()

    def add_step(self, *, gamma: int, verdict: Verdict, num_tokens: int, now_s: float) -> None:
        """Add one step.

        Args:
            gamma: Draft tokens that were proposed.
            verdict: The target's answer.
            num_tokens: Tokens of it that were committed.
            now_s: When.
        """
        if self._num_steps == 0:
            self._first_token_s = now_s
        self._last_token_s = now_s
        self._num_steps += 1
        self._completion_tokens += num_tokens
        self._sweeps.add(verdict.timings)
        if gamma > 0:
            self._histogram[verdict.num_accepted] += 1
            self._num_draft_tokens += gamma
            self._num_rejecting_steps += verdict.num_accepted < gamma

    def summary(self) -> Summary:
        """The totals so far."""
        return Summary(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_steps=self._num_steps,
            acceptance_histogram=tuple(self._histogram),
            num_draft_tokens=self._num_draft_tokens,
            num_rejecting_steps=self._num_rejecting_steps,
            num_sweeps=self._sweeps.num_sweeps,
            bytes_streamed=self._sweeps.bytes_streamed,
            sweep_ns=self._sweeps.sweep_ns,
            ttft_s=self._first_token_s - self._start_s,
            duration_s=self._last_token_s - self._start_s,
        )
