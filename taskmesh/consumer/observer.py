"""What a consumer tells whoever measures it. Nobody does unless asked to: then nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Observer(Protocol):
    """Hears of claims, renewals and ends. It is called for every task: it has to be quick, and must not raise."""

    def claimed(self, waited_s: Sequence[float], took_s: float, tried: int) -> None:
        """A claim of `tried` tasks took so long. `waited_s`: for how long each that was won had been claimable."""

    def renewed(self, name: str, share_left: float) -> None:
        """A lease was renewed when this share of it was left. Called from the pinger's thread."""

    def ended(self, name: str, outcome: str, seconds: float) -> None:
        """An execution ended, so long after its claim."""
