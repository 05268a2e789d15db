"""Stages: a task that goes on in another queue, as the same document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskmesh.model.errors import InvalidParams
from taskmesh.model.ids import shown
from taskmesh.model.queue import checked_queue


class Next(Exception):
    """Raise or return this in a handler: the task goes on in `queue`, as the same document. Nothing is counted.

    `params` replace those of the task; None: they stay. What ends here is kept in `Task.stages`; the next stage starts with
    `attempt` 1. The handler is the one that `@definition.on_queue(queue)` gave the queue; without one, the task's own. A retry
    stays in the stage that failed; a task that starts over (`fresh=True`, `run_again`, `clean_success`) starts in its first
    stage.

        raise Next(queue="encode", params={"path": path, "codec": "av1"})

    Raises `InvalidOption` for an invalid queue, `InvalidParams` for params that are not a mapping.
    """

    def __init__(self, *, queue: str, params: Mapping[str, Any] | None = None) -> None:
        self.queue = checked_queue(queue)
        self.params = _checked(params)
        super().__init__(f"goes on in queue {queue!r}")


def _checked(params: Any) -> dict[str, Any] | None:
    if params is None:
        return None
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise InvalidParams(f"params of Next must be a mapping by parameter name, got {shown(params)}")
    return dict(params)


def checked_next(error: Next) -> Next:
    """Return it, checked again: an attribute can be set to anything, and a subclass may have set none."""
    error.queue = checked_queue(getattr(error, "queue", None))
    error.params = _checked(getattr(error, "params", None))
    return error
