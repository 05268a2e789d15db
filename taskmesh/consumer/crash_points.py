"""Where a fault test lets an execution end as by the loss of its worker: `taskmesh.testing.kill_at` asks for it here.

Nothing is asked for outside of such tests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class CrashPoint:
    """The next execution in this process that comes to the record of this step is lost there."""

    step: str
    reached: bool = False


asked_for: list[CrashPoint] = []


def is_reached(step: str) -> bool:
    """Whether an execution is to be lost before the record of this step; each point is reached once."""
    for point in asked_for:
        if point.step == step and not point.reached:
            point.reached = True
            return True
    return False
