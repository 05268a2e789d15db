"""What a consumer tells whoever measures it. Nobody does unless asked to: then nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Wait(NamedTuple):
    """How long a task had been claimable when its claim was sent, split by what it waited for."""

    name: str
    unseen_s: float
    """Until this worker knew of it: it was busy with others, or an index or the change stream is slow."""
    held_s: float
    """From then on: until a slot was free, and a limit had room."""

    @property
    def all_s(self) -> float:
        """Both together."""
        return self.unseen_s + self.held_s


class Observer(Protocol):
    """Hears of claims, renewals and ends. It is called for every task: it has to be quick, and must not raise."""

    def claimed(self, waits: Sequence[Wait], took_s: float, tried: int) -> None:
        """A claim of `tried` tasks took so long. `waits`: how long each that was won had been claimable."""

    def started(self, name: str, after_s: float) -> None:
        """A handler was called so long after its claim was answered. Of a plain one: in its thread."""

    def renewed(self, name: str, share_left: float) -> None:
        """A lease was renewed when this share of it was left. Called from the pinger's thread."""

    def ended(self, name: str, outcome: str, seconds: float) -> None:
        """An execution ended, so long after its claim."""
