"""Crash points: where a fault test loses an execution, as if its worker had died. See `taskmesh.testing.kill_at`.

Outside of such tests there are none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class CrashPoint:
    """The next execution in this process that is about to record this step is lost there."""

    step: str
    reached: bool = False


asked_for: list[CrashPoint] = []


def is_reached(step: str) -> bool:
    """Whether an execution is to be lost before it records this step. Each crash point is reached once."""
    for point in asked_for:
        if point.step == step and not point.reached:
            point.reached = True
            return True
    return False
