"""Who may run now: the admission policy over sequences. Pure: no I/O, no clock."""

from collections import OrderedDict
from collections.abc import Sequence

from headrace.errors import InvalidRequest, QueueFull


class Batcher:
    """First come, first served, up to a number of live and a number of waiting sequences."""

    def __init__(self, *, max_live: int, max_waiting: int) -> None:
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._live: set[str] = set()
        self._waiting: OrderedDict[str, None] = OrderedDict()

    @property
    def num_live(self) -> int:
        """Sequences that run."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return len(self._waiting)

    def enter(self, sequence_ids: Sequence[str]) -> list[str]:
        """Take all sequences of a request, or none.

        Returns:
            Those that may run at once; the others wait.

        Raises:
            QueueFull: They do not fit now.
            InvalidRequest: They never will.
        """
        room = self._max_live + self._max_waiting
        if len(sequence_ids) > room:
            raise InvalidRequest(f"this gateway takes at most {room} choices", param="n")
        if len(sequence_ids) > room - self.num_live - self.num_waiting:
            raise QueueFull(
                f"{self.num_waiting} sequences wait already: send the request again later"
            )
        self._waiting.update(dict.fromkeys(sequence_ids))
        return self._promote()

    def leave(self, sequence_id: str) -> list[str]:
        """Forget a sequence, live or waiting; unknown ones are fine.

        Returns:
            The sequences whose turn it is now.
        """
        self._live.discard(sequence_id)
        self._waiting.pop(sequence_id, None)
        return self._promote()

    def _promote(self) -> list[str]:
        promoted = []
        while self._waiting and len(self._live) < self._max_live:
            sequence_id, _ = self._waiting.popitem(last=False)
            self._live.add(sequence_id)
            promoted.append(sequence_id)
        return promoted
