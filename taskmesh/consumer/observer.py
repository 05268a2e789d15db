"""Observer: what a consumer reports to whoever measures it. By default nobody does, and nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Wait(NamedTuple):
    """How long a task had been claimable when its claim was sent, split by what it waited for."""

    name: str
    unseen_s: float
    """Until this worker knew of it: the worker was busy with others, or an index or the change stream is slow."""
    held_s: float
    """From then on: until a slot was free and limits had room."""

    @property
    def all_s(self) -> float:
        """The sum of both."""
        return self.unseen_s + self.held_s


class Observer(Protocol):
    """Is told of claims, renewals and ends. It is called for every task, so it has to be quick and must not raise."""

    def claimed(self, waits: Sequence[Wait], took_s: float, tried: int) -> None:
        """A claim of `tried` tasks took `took_s`. `waits`: for each task won, how long it had been claimable."""

    def started(self, name: str, after_s: float) -> None:
        """A handler was called `after_s` after its claim was answered. For plain functions: in the thread."""

    def renewed(self, name: str, share_left: float) -> None:
        """A lease was renewed when this share of it was left. Called from the pinger's thread."""

    def ended(self, name: str, outcome: str, seconds: float) -> None:
        """An execution ended, `seconds` after its claim."""
