"""Loops: what workers run again and again without its being published, once in the fleet, in each worker or on each host.

A singleton is a loop that is not expected to end: it has one live instance in the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.labels import HOST
from taskmesh.model.option import TaskOption

Per = Literal["fleet", "worker", "host"]

FLEET = "fleet"
"""The key of the single task of a loop that runs once in the fleet."""
_UNLIMITED = 1_000_000_000
_LONGEST_KEY_BYTES = 512


@dataclass(frozen=True, slots=True)
class Loop:
    """How a function runs again and again."""

    per: Per = "fleet"
    interval_ms: int | None = None
    """From its last end to its next start. None: a singleton, which is started again after its retry delay."""

    @property
    def is_singleton(self) -> bool:
        """Whether it is not expected to end."""
        return self.interval_ms is None

    def key(self, worker_id: str, labels: Mapping[str, Any]) -> str:
        """Return the key of the task by which this worker runs it. Workers with the same key run it in turns."""
        if self.per == "fleet":
            return FLEET
        place = worker_id if self.per == "worker" else str(labels[HOST])
        return place.replace("\0", " ").encode()[:_LONGEST_KEY_BYTES].decode(errors="ignore") or "-"

    def delay_ms(self, stored_option: Mapping[str, Any]) -> int:
        """Return how long it rests after an execution that ended well."""
        return int(stored_option["unexpected_retry_delay_ms"]) if self.interval_ms is None else self.interval_ms

    def delay_after_failure_ms(self, stored_option: Mapping[str, Any]) -> int | None:
        """Return how long it rests after a failure, unless its retry delay determines that: never longer than otherwise."""
        if self.interval_ms is None or self.interval_ms > stored_option["unexpected_retry_delay_ms"]:
            return None
        return self.interval_ms

    def stored(self) -> dict[str, Any]:
        """Return it as it is stored with its task."""
        kind = {"singleton": True} if self.is_singleton else {"interval_ms": self.interval_ms}
        return {"per": self.per, **kind}


def checked_loop(interval_ms: Any, per: Any) -> Loop:
    """Return the loop. Raises `InvalidOption`."""
    whole = isinstance(interval_ms, int) and not isinstance(interval_ms, bool)
    if not whole or not 1 <= interval_ms <= MAX_DURATION_MS:
        raise InvalidOption(
            f"interval_ms must be a whole number from 1 to {MAX_DURATION_MS} (ten years), got {shown(interval_ms)}: set how many "
            "milliseconds pass from the end of one run to the start of the next"
        )
    if not isinstance(per, str) or per not in get_args(Per):
        raise InvalidOption(f"per must be 'fleet', 'worker' or 'host', got {shown(per)}: say where the loop runs once")
    return Loop(per, interval_ms)  # type: ignore[arg-type]  # it is one of these, as was just asked


def option_of_loop(name: str, option: TaskOption) -> TaskOption:
    """Return the option of a loop's task: neither failures nor lost executions end it for good. Raises `InvalidOption`."""
    if option.concurrent_worker_cnt != 1:
        raise InvalidOption(
            f"task {name!r}: concurrent_worker_cnt must be 1 for a loop or a singleton, got {option.concurrent_worker_cnt}: "
            'for one in each worker, use mesh.loop(…, per="worker")'
        )
    # Once cancelled, it stays so until somebody retries it.
    return option.changed(max_unexpected_retries=_UNLIMITED, max_timeouts=_UNLIMITED, retain_failed_ms=None)


def option_of_broadcast(name: str, option: TaskOption) -> TaskOption:
    """Return the option of a broadcast: a worker that fails waits, and no other. Raises `InvalidOption`."""
    if option.concurrent_worker_cnt != 1:
        raise InvalidOption(
            f"task {name!r}: concurrent_worker_cnt of a broadcast follows from the workers that are live when it is published, "
            f"got {option.concurrent_worker_cnt}: leave it out"
        )
    if "unexpected_retry_delay_scope" in option.model_fields_set:
        return option
    return option.changed(unexpected_retry_delay_scope="worker")


def check_published(name: str, *, is_loop: bool) -> None:
    """Raise `InvalidOption` for a loop: a second task of it would be a second instance."""
    if is_loop:
        raise InvalidOption(
            f"task {name!r} is a loop or a singleton, which workers start by themselves: it cannot be published; "
            f"`taskmesh retry {name} KEY` runs a waiting one at once"
        )
