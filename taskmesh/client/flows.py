"""Flows: publish many tasks that wait for each other as a whole, and follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from graphlib import CycleError, TopologicalSorter
from types import TracebackType
from typing import Any, Self, TypeVar

from pymongo.errors import PyMongoError

from taskmesh.client.connection import Connection, sample
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.handle import TaskHandle
from taskmesh.client.publisher import Publisher
from taskmesh.client.tasks import Tasks
from taskmesh.model.dependency import Dependencies, OnDependencyFailure, label
from taskmesh.model.errors import InvalidOption, TaskFinished, TaskNotFound, TaskTooLarge
from taskmesh.model.flow import FlowStatus, FlowTask, TaskName
from taskmesh.model.task import Status, checked_key, checked_name, task_id
from taskmesh.model.times import checked_timeout
from taskmesh.store import Store, apart, flows
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.publication import Publication, line_of

R = TypeVar("R")
_UNFINISHED = (Status.INIT, Status.RUNNING)


class Flow:
    """Tasks that are published as a whole, at the end of its `async with` block; if that raises, nothing is published.

        async with mesh.flow("import-2026-11") as flow:
            parts = [flow.add(load, f"part-{i}", n=i) for i in range(10_000)]
            flow.add(merge, "merge", after=parts)

    Publishing the same flow again adds new tasks, and completes what was cut off; existing tasks join the flow unchanged.
    """

    def __init__(self, flows: Flows, key: str) -> None:
        self._flows = flows
        self.key = checked_key(key)
        self._members: dict[str, tuple[Publication, TaskHandle[Any]]] = {}
        self._over = False

    def add(
        self,
        definition: TaskDefinition[..., R] | str,
        key: str,
        /,
        *,
        params: Mapping[str, Any] | None = None,
        after: Dependencies | None = None,
        on_dependency_failure: OnDependencyFailure | None = None,
        **named: Any,
    ) -> TaskHandle[R]:
        """Add a task. `definition` is what `@mesh.task` returned (configured, if you like), or a task's name.

        `after`, `on_dependency_failure` as in `configure`; if the handler has params with these names, pass them in `params`.
        Returns the task's handle, for use in `after` now and for its result after the flow is published. Raises as `publish`
        does, and `InvalidOption` for a second task with that name and key.
        """
        if self._over:
            raise InvalidOption(f"flow {self.key!r} is published already: open it again with mesh.flow to add to it")
        given = {**(params or {}), **named}
        publication, handle = self._flows.member(definition, key, given, after, on_dependency_failure)
        if publication.id in self._members:
            raise InvalidOption(f"{label(publication.id)} is in flow {self.key!r} twice: give one of them another key")
        self._members[publication.id] = publication, handle
        return handle

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if kind is None:
            await self._flows.publish(self.key, self._members)

    async def status(self) -> FlowStatus:
        """Return how far it has come. Raises `TaskNotFound` for a flow that was never published."""
        return await self._flows.status(self.key)

    async def result(self, timeout: float | None = None) -> dict[TaskName, Any]:
        """Wait for the members that nothing comes after, and return their results by `(name, key)`."""
        return await self._flows.result(self.key, timeout)

    async def cancel(self) -> FlowStatus:
        """Cancel the members that are not finished."""
        return await self._flows.cancel(self.key)

    async def retry(self) -> FlowStatus:
        """Restart the members that did not end as SUCCESS."""
        return await self._flows.retry(self.key)


class Flows:
    """The flows of a mesh."""

    def __init__(self, connection: Connection, publisher: Publisher, tasks: Tasks) -> None:
        self._connection = connection
        self._publisher = publisher
        self._tasks = tasks

    @property
    def _store(self) -> Store:
        return self._connection.store

    def member(
        self,
        definition: TaskDefinition[..., R] | str,
        key: str,
        params: Mapping[str, Any],
        after: Dependencies | None,
        on_dependency_failure: OnDependencyFailure | None,
    ) -> tuple[Publication, TaskHandle[R]]:
        """Return a member's publication, checked, and its handle."""
        task = self._publisher.definitions.get(checked_name(definition)) if isinstance(definition, str) else definition
        if task is None:
            raise InvalidOption(
                f"flow.add got the name {definition!r}, which this mesh does not define: define it, or publish it with after="
            )
        settings: dict[str, Any] = {} if after is None else {"after": after}
        if on_dependency_failure is not None:
            settings["on_dependency_failure"] = on_dependency_failure
        configuration = task.configuration.changed(**settings) if settings else task.configuration
        if configuration.session is not None:
            raise InvalidOption(
                "session was set: a flow is published as a whole by itself, not in a transaction of yours"
            )
        if wrong := configuration.for_existing:
            raise InvalidOption(
                f"{wrong[0]} was set: a flow joins a task that is there already, and does not change it: leave {wrong[0]} out, "
                "or publish the task by itself"
            )
        stored, size = task.to_store(params, configuration.given_after)
        configuration, size_of_fields = self._publisher.final_configuration(task, configuration)
        if task.broadcast:
            raise InvalidOption(
                f"task {task.name!r} is a broadcast, which is for the workers that are live when it is published: publish it "
                "by a task of the flow, current_task().publish(…)"
            )
        size += size_of_fields
        publication = self._publisher.new_publication(task, checked_key(key), stored, configuration, size, apart=True)
        handle: TaskHandle[R] = TaskHandle(self._tasks, task.name, key, returns=task.returns)
        return publication, handle

    async def publish(self, key: str, members: Mapping[str, tuple[Publication, TaskHandle[Any]]]) -> None:
        """Publish a flow. Raises `InvalidOption` for a circle, `TaskNotFound`, `TaskFinished`, `TaskTooLarge`."""
        publications = [publication for publication, _ in members.values()]
        _check_no_circle(key, publications)
        if sum(len(id_) + 16 for id_ in members) > flows.MAX_BYTES:
            raise TaskTooLarge(
                f"flow {key!r} has {len(members)} members, more than one flow can name: make several of it"
            )
        await self._connection.create_what_is_missing()
        store = self._store
        flow = await patiently(lambda: flows.read(store, key))
        if flow is not None and await patiently(partial(flows.forgotten, store, flow)):
            flow = None
        if flow is not None and set(members) <= set(flow["members"]) and flow["state"] == "opened":
            return
        joined: set[str] = set()
        if flow is not None and flow["members"] and flow["state"] == "opened":
            status = await self.status(key)
            if status.finished:
                raise TaskFinished(f"flow {key!r} is finished: give a flow with other members another key")
            # These keep what they wait for, which may be gone by now.
            joined = {task_id(task.name, task.key) for task in status.tasks if task.status is not None}
        new = [each for each in publications if each.id not in joined]
        outside = {id_ for each in new if (after := each.configuration.after) for id_ in after.ids}
        if outside := outside.difference(members):
            await self._connection.links.check(outside)
        for publication in publications:
            publication.flow = key
        await patiently(lambda: apart.put(store, [value for each in publications for value in each.apart]))
        await patiently(lambda: flows.begin(store, key, list(members)))
        if self._connection.clock.stale:
            await sample(self._connection.clock, store)
        published = await patiently(lambda: flows.publish_members(store, publications, self._connection.clock.now()))
        for result, (_, handle) in zip(published, members.values(), strict=True):
            handle.is_published(created=result.created)
        unwanted = [each for each, result in zip(publications, published, strict=True) if not result.created]
        await self._connection.remove_apart(value.id for each in unwanted for value in each.apart)
        await patiently(lambda: flows.seal(store, key))
        try:
            await patiently(lambda: flows.open_members(store, key))
        except PyMongoError:  # it is published: the next sweep opens the rest
            return

    async def status(self, key: str) -> FlowStatus:
        """Return how far a flow has come. Raises `TaskNotFound`."""
        document = await flows.read(self._store, checked_key(key))
        if document is None:
            raise TaskNotFound(f"there is no flow {key!r}: it was never published, or nothing is left of it")
        ids: list[str] = document["members"]
        found = {task["_id"]: task for task in await flows.members(self._store, ids)}
        tasks = [FlowTask(**_parts(id_), status=found[id_]["status"] if id_ in found else None) for id_ in ids]
        counts: dict[str, int] = {}
        for task in tasks:
            counts[task.status or "GONE"] = counts.get(task.status or "GONE", 0) + 1
        unfinished = sum(counts.get(status, 0) for status in _UNFINISHED)
        edges = [
            (_name_and_key(before), _name_and_key(id_))
            for id_ in ids
            if id_ in found
            for before in found[id_].get("after") or ()
        ]
        return FlowStatus(
            key=key,
            counts=counts,
            progress=1 - unfinished / len(ids) if ids else 1.0,
            tasks=tasks,
            edges=edges,
            published=document["state"] != "open",
        ).with_actions(self)

    async def key_of(self, name: str, key: str) -> str | None:
        """Return the key of the newest flow that a task is a member of, if it is in any."""
        return await flows.of_member(self._store, task_id(name, key))

    async def of(self, name: str, key: str) -> FlowStatus:
        """Return the newest flow that a task is a member of. Raises `TaskNotFound`."""
        found = await self.key_of(name, key)
        if found is None:
            raise TaskNotFound(f"task {name!r} {key!r} is in no flow")
        return await self.status(found)

    async def result(self, key: str, timeout: float | None) -> dict[TaskName, Any]:
        """See `FlowStatus.result`."""
        status = await self.status(key)
        handles = {last: self._publisher.handle(*last) for last in status.last}
        seconds = checked_timeout(timeout)
        if seconds is not None and seconds <= 0:  # one look
            return {last: await handle.result(0) for last, handle in handles.items()}
        try:
            async with asyncio.timeout(seconds):
                return {last: await handle.result() for last, handle in handles.items()}
        except TimeoutError:
            raise TimeoutError(f"flow {key!r} has not finished within {timeout} s") from None

    async def cancel(self, key: str) -> FlowStatus:
        """See `FlowStatus.cancel`."""
        status = await self.status(key)
        await flows.cancel(self._store, [task_id(task.name, task.key) for task in status.tasks])
        return await self.status(key)

    async def retry(self, key: str) -> FlowStatus:
        """See `FlowStatus.retry`."""
        status = await self.status(key)
        failed = [
            task_id(task.name, task.key) for task in status.tasks if task.status in ("FAIL", "CANCELLED", "EXPIRED")
        ]
        found = await flows.members(self._store, failed)
        # What failed by itself first: it brings back those that failed because of it. Then those that failed because of others.
        await flows.retry(self._store, [task["_id"] for task in found if not task["by_dependency"]])
        left = [task["_id"] for task in found if task["by_dependency"]]
        await flows.retry(self._store, left)
        return await self.status(key)


def _check_no_circle(key: str, publications: list[Publication]) -> None:
    """Raise `InvalidOption` if members wait for each other in a circle: by `after`, or by their places in a sequence."""
    waits_for: dict[str, list[str]] = {}
    last_in_line: dict[str, str] = {}
    for each in publications:
        waits_for[each.id] = list(each.configuration.after.ids) if each.configuration.after else []
        if each.configuration.sequence_key is not None:
            line = line_of(each.configuration)["line"]
            if line in last_in_line:
                waits_for[each.id].append(last_in_line[line])
            last_in_line[line] = each.id
    try:
        TopologicalSorter(waits_for).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        remedy = ": of tasks with one sequence_key, add first what others wait for" if last_in_line else ""
        raise InvalidOption(
            f"flow {key!r} has a circle, so none of it could ever run: {' waits for '.join(map(label, circle[:5]))}{remedy}"
        ) from None


def _parts(id_: str) -> dict[str, str]:
    name, _, key = id_.partition(":")
    return {"name": name, "key": key}


def _name_and_key(id_: str) -> TaskName:
    name, _, key = id_.partition(":")
    return name, key
