"""When to start a batch: the policies that keep live sequences together. Pure: no I/O, no clock.

Sequences go round between two stations, the draft and the target. If both started with whoever
came first, the sequences would fall into halves that alternate for ever, each sweep carrying one of
them. If both waited for everybody, each would wait for those that the other holds back. So the
target, where a batch is dear, waits for the sequences that are on their way to it; the draft, where
it is cheap, waits only while they keep coming.

A sequence that missed a batch is not waited for again until it shows up.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

_WEIGHT_OF_NEWEST = 0.3


class GatherWindow(ABC):
    """Knows who is on the way: opened, or answered, and not back yet. Times are on one clock."""

    def __init__(self) -> None:
        self._expected: dict[str, float] = {}
        """Since when."""

    def expect(self, sequence_id: str, *, now_s: float) -> None:
        """A sequence was opened."""
        self._expected[sequence_id] = now_s

    def forget(self, sequence_id: str) -> None:
        """A sequence was closed."""
        self._expected.pop(sequence_id, None)

    def arrived(self, sequence_id: str, *, now_s: float) -> None:
        """A sequence is pending."""
        self._expected.pop(sequence_id, None)

    def deadline_s(self, *, began_s: float) -> float:
        """Until when the batch that could start waits for more sequences.

        Args:
            began_s: When it could start: a sequence is pending, and the last batch is over.
        """
        return self._deadline_s(self._expected, began_s) if self._expected else began_s

    def started(self) -> None:
        """The batch began; whoever was expected missed it."""
        self._expected.clear()

    def finished(self, sequence_ids: Collection[str], *, batch_s: float, now_s: float) -> None:
        """The batch ended after batch_s seconds, and these sequences got their answers."""
        self._expected.update(dict.fromkeys(sequence_ids, now_s))

    @abstractmethod
    def _deadline_s(self, expected: Mapping[str, float], began_s: float) -> float: ...


class QuietWindow(GatherWindow):
    """Waits while sequences keep coming: those of one sweep arrive within a short time."""

    _SHARE = 0.2
    """Of a batch's time, that a silence may cost at most."""

    def __init__(self, *, quiet_s: float = 0.02, max_s: float = 0.25) -> None:
        """Set the limits.

        Args:
            quiet_s: Without an arrival for so long, nobody else comes.
            max_s: Longest wait.
        """
        super().__init__()
        self._quiet_s = quiet_s
        self._max_s = max_s
        self._newest_s = 0.0
        self._batch_s: float | None = None

    def arrived(self, sequence_id: str, *, now_s: float) -> None:
        """A sequence is pending."""
        super().arrived(sequence_id, now_s=now_s)
        self._newest_s = now_s

    def finished(self, sequence_ids: Collection[str], *, batch_s: float, now_s: float) -> None:
        """The batch ended after batch_s seconds, and these sequences got their answers."""
        super().finished(sequence_ids, batch_s=batch_s, now_s=now_s)
        self._batch_s = _mean(self._batch_s, batch_s)

    def _deadline_s(self, expected: Mapping[str, float], began_s: float) -> float:
        quiet_s = self._quiet_s
        if self._batch_s is not None:
            quiet_s = min(quiet_s, self._SHARE * self._batch_s)
        return min(max(began_s, self._newest_s) + quiet_s, began_s + self._max_s)


class ReturnWindow(GatherWindow):
    """Waits for as long as sequences usually take to come back, but no longer than a batch takes.

    With a return time R and a batch time T, sequences that stay together get a batch every T + R,
    halves that alternate get one every 2 T: waiting pays as long as R is below T.
    """

    _PATIENCE = 1.5
    """Times the usual return."""

    def __init__(self, *, first_s: float = 0.25) -> None:
        """Begin without measurements.

        Args:
            first_s: Stands for the return and the batch time until one was seen.
        """
        super().__init__()
        self._first_s = first_s
        self._away: dict[str, float] = {}
        """Since when, for each sequence that was answered; missing a batch does not end it."""
        self._return_s: float | None = None
        self._batch_s: float | None = None

    def arrived(self, sequence_id: str, *, now_s: float) -> None:
        """A sequence is pending; how long it was away tells what to expect of others."""
        super().arrived(sequence_id, now_s=now_s)
        since_s = self._away.pop(sequence_id, None)
        if since_s is not None:
            self._return_s = _mean(self._return_s, now_s - since_s)

    def finished(self, sequence_ids: Collection[str], *, batch_s: float, now_s: float) -> None:
        """The batch ended after batch_s seconds, and these sequences got their answers."""
        super().finished(sequence_ids, batch_s=batch_s, now_s=now_s)
        self._away.update(dict.fromkeys(sequence_ids, now_s))
        self._batch_s = _mean(self._batch_s, batch_s)

    def forget(self, sequence_id: str) -> None:
        """A sequence was closed."""
        super().forget(sequence_id)
        self._away.pop(sequence_id, None)

    def _deadline_s(self, expected: Mapping[str, float], began_s: float) -> float:
        return_s = self._first_s if self._return_s is None else self._return_s
        batch_s = self._first_s if self._batch_s is None else self._batch_s
        return min(max(expected.values()) + self._PATIENCE * return_s, began_s + batch_s)


def _mean(mean: float | None, newest: float) -> float:
    """A running mean that forgets."""
    return newest if mean is None else mean + _WEIGHT_OF_NEWEST * (newest - mean)
