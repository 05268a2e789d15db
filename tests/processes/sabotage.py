"""Broken parts, put into a worker on purpose: a test shows that the rest holds without them, or that somebody notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from taskmesh.consumer.execution import Execution
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.pinger import Pinger

PARTS: dict[str, Callable[[], None]] = {}


def part(function: Callable[[], None]) -> Callable[[], None]:
    """Enter a way of breaking under its function's name."""
    PARTS[function.__name__] = function
    return function


@part
def notices_no_loss() -> None:
    """The worker trusts its lease for ever, so that whatever it sends late does reach the server."""

    def renewed(self: Execution, sent: float) -> None:
        self.lease_until = float("inf")
        self.next_ping = sent + self.stored_option["ping_interval_ms"] / 1000

    def ignore(*_: object) -> None: ...

    def ping_on(_: Pinger, execution: Execution) -> None:
        execution.ping_again(time.monotonic())

    _replace(Execution, "renewed", renewed)
    _replace(Execution, "check_lease", ignore)
    _replace(Executor, "lose", ignore)
    _replace(Pinger, "_give_up", ping_on)


def _replace(owner: type, method: str, by: Callable[..., Any]) -> None:
    assert callable(getattr(owner, method)), f"{owner.__name__}.{method} is gone: what is to be broken in its place?"
    setattr(owner, method, by)
