"""Where a sweep computes on the units that a session lends: in the slots, or on a device."""

from typing import Protocol

import torch

from services.target.device_units import DeviceUnits
from services.target.feed_session import FeedSession
from services.target.ring import LeasedUnit


class Units(Protocol):
    """Lends the units of a sweep in order, one at a time. But for `close`, on one thread."""

    session: FeedSession

    @property
    def is_between_sweeps(self) -> bool:
        """Whether a sweep may begin, as far as is known."""

    def begin(self) -> None:
        """Be told that a sweep was asked for."""

    def acquire(self) -> LeasedUnit:
        """Wait for the next unit.

        Raises:
            HeadraceError: The stream has failed.
        """

    def release(self) -> None:
        """End the use of the unit that is out."""

    async def close(self) -> None:
        """End the session, and free what is held beside it."""


class SlotUnits:
    """On the processor: the slots themselves, nothing is copied."""

    def __init__(self, session: FeedSession) -> None:
        self.session = session
        self.acquire = session.acquire
        self.release = session.release
        self.close = session.close

    @property
    def is_between_sweeps(self) -> bool:
        """See Units."""
        return self.session.is_between_sweeps

    def begin(self) -> None:
        """Nothing to prepare."""


def units_on(device: torch.device, session: FeedSession) -> Units:
    """What computes on a device gets.

    Raises:
        PeerUnavailable: The device refuses.
    """
    return SlotUnits(session) if device.type == "cpu" else DeviceUnits(session, device)
