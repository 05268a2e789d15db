"""Tasks of changes, for workers that read them and die between two steps of that: see `test_data_changes.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskmesh import ChangeEvent, TaskMesh, TaskOption
from taskmesh.client import defining
from taskmesh.client.definition import TaskDefinition
from taskmesh.store.triggers import data_changes
from tests.processes.handlers import SHORT_LEASE

FORGOTTEN_AT_ONCE = TaskOption(retain_success_ms=0)
"""So that nothing but the place tells which changes have been tasks already."""


def define(
    mesh: TaskMesh, directory: Path | None = None, seen: list[ChangeEvent] | None = None
) -> TaskDefinition[[ChangeEvent], None]:
    """Define the tasks. `directory`: of a process that reads the changes; `seen`: what the handler gets."""
    if directory is not None:
        defining.READER_OPTION = SHORT_LEASE  # type: ignore[attr-defined]  # as this process defines its readers

    @mesh.on_change("orders", [{"$match": {"operationType": {"$ne": "drop"}}}], option=FORGOTTEN_AT_ONCE)
    async def ordered(event: ChangeEvent) -> None:
        assert seen is not None, "a process that only reads changes ran a task"
        seen.append(event)

    return ordered


def _dies_before(name: str, *, if_: Callable[..., bool] = lambda *_, **__: True) -> Callable[[], None]:
    whole = getattr(data_changes, name)

    def break_it() -> None:
        async def die(*arguments: Any, **settings: Any) -> Any:
            if if_(*arguments, **settings):
                os.kill(os.getpid(), signal.SIGKILL)
            return await whole(*arguments, **settings)

        setattr(data_changes, name, die)

    return break_it


def _dies_after(name: str, *, if_: Callable[..., bool] = lambda *_: True) -> Callable[[], None]:
    whole = getattr(data_changes, name)

    def break_it() -> None:
        async def do_and_die(*arguments: Any, **settings: Any) -> Any:
            done = await whole(*arguments, **settings)
            if if_(done, *arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        setattr(data_changes, name, do_and_die)

    return break_it


READING: dict[str, Callable[[], None]] = {
    "changes: before the place is begun": _dies_before("begin"),
    "changes: after the place is begun": _dies_after("begin"),
    "changes: after events were read": _dies_after("next_events", if_=lambda events, *_: bool(events)),
    "changes: before the transaction": _dies_before("publish_and_move"),
    "changes: in the transaction, when the place is moved": _dies_after("_moved", if_=lambda _, *given: given[3]),
    "changes: in the transaction, when all is published": _dies_after("publish_in_session"),
    "changes: after the transaction": _dies_after("publish_and_move"),
}
"""Where a reader may die, in the order of its way."""
