"""The results of a task's dependencies, for its handler: by `dependencies()`, or as params."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from taskmesh.client.definition import TaskDefinition
from taskmesh.client.params import Params
from taskmesh.client.returns import PLAIN
from taskmesh.model.dependency import label
from taskmesh.model.errors import InvalidParams, Snooze, TaskError
from taskmesh.model.task import Status
from taskmesh.store import Store
from taskmesh.store.find import UNFINISHED
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.payloads import Payloads, unmarked
from taskmesh.store.relations.dependencies import WaitedFor

_LOOKS_AGAIN_MS = 2_000
"""How long a task is put off if one of its params is the result of a dependency that has been restarted."""


class DependencyResults:
    """Reads them, on one worker. Create it in the event loop in which it is used."""

    def __init__(self, store: Store, definitions: Mapping[str, TaskDefinition[Any, Any]], payloads: Payloads) -> None:
        self._store = store
        self._payloads = payloads
        self._definitions = definitions
        self._dependencies = WaitedFor(store)
        self._loop = asyncio.get_running_loop()

    async def of(self, id_: str) -> dict[tuple[str, str], Any]:
        """Return the results by name and key. A dependency that did not end as SUCCESS is represented by a `TaskError`."""
        return {_name_and_key(each["_id"]): self._result(each) for each in await self._waited_for(id_)}

    def in_thread(self, id_: str, *, plain: bool = False) -> dict[tuple[str, str], Any]:
        """Return the same, called from a thread other than the event loop's. `plain`: the values as they are stored."""
        return asyncio.run_coroutine_threadsafe(self._plain_of(id_) if plain else self.of(id_), self._loop).result()

    async def _plain_of(self, id_: str) -> dict[tuple[str, str], Any]:
        return {_name_and_key(each["_id"]): self._plain(each) for each in await self._waited_for(id_)}

    def are_wanted(self, params: Params, document: Document) -> bool:
        """Whether a claimed task may get results of dependencies as params: see `feed`."""
        return bool(params.from_dependencies) or "after" in document["task_state"]

    async def feed(self, params: Params, document: Document) -> None:
        """Put results into the params of a claimed task, as its publisher or its handler's annotations require.

        Raises `InvalidParams` if there is no such dependency, `TaskError` if one did not end as SUCCESS, and `Snooze` while one
        that has been restarted is not finished.
        """
        wanted: dict[str, str | None] = {name: mark.id for name, mark in params.from_dependencies.items()}
        if (
            "own_params" not in document["task_state"]
        ):  # what its publisher asked for does not apply to params that its handler has given
            wanted |= dict(document["task_state"].get("after", {}).get("params", ()))
        if not wanted:
            return
        found = {each["_id"]: each for each in await self._waited_for(document["_id"])}
        values = {}
        for name, named in wanted.items():
            id_ = next(iter(found)) if named is None and len(found) == 1 else named
            if id_ in found:
                dependency = found[id_]
                if not _is_finished(dependency):
                    told = f"{name!r} is the result of {label(dependency['_id'])}, which was started again"
                    raise Snooze(told, delay_ms=_LOOKS_AGAIN_MS)
                value = self._plain(dependency)
                if isinstance(value, TaskError):
                    raise value
                values[name] = value
            elif not params.is_optional(name):
                why = (
                    f"its only dependency, and it has {len(found)}: say which, FromDependency(name, key)"
                    if id_ is None
                    else f"{label(id_)}, for which it did not wait: name that in after"
                )
                raise InvalidParams(f"task {label(document['_id'])}: {name!r} is the result of {why}")
        document["params"] = {**(document.get("params") or {}), **values}

    async def _waited_for(self, id_: str) -> list[Document]:
        found = await patiently(lambda: self._dependencies.by(id_))
        return [await patiently(partial(self._payloads.fetched, self._store, each)) for each in found]

    def _result(self, document: Document) -> Any:
        value = self._plain(document)
        definition = self._definitions.get(document["_id"].partition(":")[0])
        if definition is None or isinstance(value, TaskError):
            return value
        return definition.returns.of_queue(document["queue"]).read(value)

    def _plain(self, document: Document) -> Any:
        """Return the result as it is stored, or the error that represents it."""
        if "status" not in document:
            return TaskError(
                f"task {label(document['_id'])} no longer exists: it was deleted, or is past its retention"
            )
        if not _is_finished(document):
            return TaskError(
                f"task {label(document['_id'])} was started again, and is {document['status']}: its old result is gone, "
                "and there is no new one yet"
            )
        task = self._payloads.task(document)
        if task.status is Status.SUCCESS and task.successes:
            return unmarked(PLAIN.read(task.successes[0].returns))
        reasons = task.fail_reasons
        said = f": {'; '.join(reasons)}" if reasons else ""
        return TaskError(f"task {label(document['_id'])} ended as {task.status}{said}", reasons)


def _is_finished(document: Document) -> bool:
    """Whether a dependency is finished. If it is not, it has been restarted since the task was opened."""
    return document.get("status") not in UNFINISHED


def _name_and_key(id_: str) -> tuple[str, str]:
    name, _, key = id_.partition(":")
    return name, key
