"""When to start a batch: the policy that keeps live sequences together. Pure: no I/O, no clock.

After a batch its sequences come back within a short time of each other. Starting at the first one
would split them into halves that alternate for ever, so a batch waits for the sequences that are
expected, but no longer than a share of what a batch takes; a sequence that missed one wait is not
waited for again until it shows up.
"""

from collections.abc import Collection

_SHARE = 0.5
_WEIGHT_OF_NEWEST = 0.3


class GatherWindow:
    """Decides how long a batch that could start waits for more sequences."""

    def __init__(self, *, min_s: float = 0.005, max_s: float = 2.0) -> None:
        """Begin with the shortest window.

        Args:
            min_s: Shortest wait for a sequence that is expected.
            max_s: Longest wait.
        """
        self._min_s = min_s
        self._max_s = max_s
        self._batch_s = 0.0
        self._expected: set[str] = set()

    def expect(self, sequence_id: str) -> None:
        """A sequence will come: it was opened, or its last answer went out."""
        self._expected.add(sequence_id)

    def forget(self, sequence_id: str) -> None:
        """A sequence will not come: it was closed."""
        self._expected.discard(sequence_id)

    def wait_s(self, pending: Collection[str]) -> float:
        """How long to wait for more than the pending sequences; 0 when nobody is missing."""
        if self._expected.issubset(pending):
            return 0.0
        return min(max(_SHARE * self._batch_s, self._min_s), self._max_s)

    def started(self) -> None:
        """A batch began; whoever was expected and is not pending missed it."""
        self._expected.clear()

    def finished(self, batch_s: float, sequence_ids: Collection[str]) -> None:
        """A batch ended after batch_s seconds and these sequences got their answers."""
        if self._batch_s == 0.0:
            self._batch_s = batch_s
        self._batch_s += _WEIGHT_OF_NEWEST * (batch_s - self._batch_s)
        self._expected.update(sequence_ids)
