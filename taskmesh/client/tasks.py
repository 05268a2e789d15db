"""Single tasks: read one, change it, wait until it is finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, Unpack

from pymongo.errors import OperationFailure

from taskmesh.client.connection import Connection
from taskmesh.client.returns import Returns
from taskmesh.model.errors import (
    IncompatibleCollection,
    TaskFinished,
    TaskNotFound,
    TaskRunning,
    TooManySignals,
    UnstorableValue,
)
from taskmesh.model.flow import FlowStatus
from taskmesh.model.ids import checked_step_name, checked_text
from taskmesh.model.option import OptionFields
from taskmesh.model.task import Task, task_id
from taskmesh.model.times import checked_timeout
from taskmesh.store import Store, audit, control, find, signals
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.server_errors import patiently
from taskmesh.store.payloads import references
from taskmesh.store.values import encoded, new_id

T = TypeVar("T")
UNSAID: Any = object()
"""The payload of a signal without one."""
_SIZE_OF_A_SIGNAL = 100
"""About how many bytes a signal has beside its payload and its event."""


class FlowsOfTasks(Protocol):
    """Gives access to flows."""

    async def of(self, name: str, key: str) -> FlowStatus:
        """Return the newest flow that a task is a member of. Raises `TaskNotFound`."""


class Tasks:
    """The operations on a task by its name and key."""

    flows: FlowsOfTasks
    """Set by the mesh, whose flows consist of tasks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _store(self) -> Store:
        return self._connection.store

    async def get(self, name: str, key: str) -> Task:
        """Return the task as it stands now, params and all. Raises `TaskNotFound`."""
        return await self._read(await self._stored(name, key))

    async def _read(self, document: Document) -> Task:
        return self._connection.payloads.task(await self._connection.fetched(document))

    async def _as_written(self, document: Document) -> Task:
        """Return the task as a change has left it: a worker may have gone on with it since."""
        return await self._read(await find.written(self._store, document))

    async def _stored(self, name: str, key: str) -> Document:
        id_ = task_id(name, key)
        found = await patiently(lambda: find.get(self._store, [id_]))
        if found and "queue" not in found[0] and await self._accepted(id_):
            found = await patiently(lambda: find.get(self._store, [id_]))
        if not found:
            raise no_such_task(name, key)
        return found[0]

    async def _accepted(self, id_: str) -> bool:
        """Accept the task if another language has inserted it and no worker has done so yet. Return whether that was so."""
        return await self._connection.acceptance.accept([id_], audit.author(None)) > 0

    async def _change(self, id_: str, change: Callable[[], Awaitable[T]]) -> T:
        """Change a task. It is accepted first if necessary: before that nothing is known about it.

        Raises `IncompatibleCollection` for a document that is no task of ours.
        """
        try:
            return await change()
        except OperationFailure as error:
            if not await self._accepted(id_):
                await self._connection.refuse_strangers([id_], error)
                raise
            return await change()

    async def cancel(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Cancel the task: CANCELLED from now on; a running execution is stopped. A finished task stays as it is.

        `by`: who, for the audit; by default the user of this process, and its host. Raises `TaskNotFound`.
        """
        id_, who = task_id(name, key), audit.author(by)
        cancelled = await self._change(id_, lambda: control.cancel(self._store, id_))
        task = await (self.get(name, key) if cancelled is None else self._as_written(cancelled))
        await audit.note(self._store, "task.cancel", who, name=name, key=key)
        return task

    async def retry(self, name: str, key: str, *, fresh: bool = False, by: str | None = None) -> Task:
        """Make a finished task INIT again, without its entries and counts; make a waiting one due at once.

        It resumes: what its handler has recorded stays, except for errors, and a sleep is not cut short. `fresh`: it starts
        over in its first stage, with nothing recorded and no signals. `by`: who, for the audit; by default the user of this
        process, and its host. Raises `TaskRunning`, `TaskNotFound`.
        """
        id_, who = task_id(name, key), audit.author(by)
        retried = await self._change(id_, lambda: control.retry(self._store, id_, fresh=fresh))
        if retried is None:
            await self.get(name, key)
            raise TaskRunning(f"task {name!r} {key!r} is running: cancel it first, or publish it with run_again")
        task = await self._as_written(retried)
        await audit.note(self._store, "task.retry", who, name=name, key=key)
        return task

    async def delete(self, name: str, key: str, *, by: str | None = None) -> Task:
        """Remove the task, and return it as it was. A running execution is stopped. Raises `TaskNotFound`.

        A document that is no task of ours, or is damaged, is removed, too; then little more than name and key is returned.

        `by`: who, for the audit; by default the user of this process, and its host.
        """
        who = audit.author(by)
        document = await self._stored(name, key)
        try:
            task = await self._read(document)
        except IncompatibleCollection:
            task = Task.remains(document)
        await control.delete(self._store, task_id(name, key))
        await self._connection.remove_apart(references(document))
        await audit.note(self._store, "task.delete", who, name=name, key=key)
        return task

    async def set_option(self, name: str, key: str, *, by: str | None = None, **changes: Unpack[OptionFields]) -> Task:
        """Change fields of a published task's option. Raises `InvalidOption`, `TaskNotFound`.

        `by`: who, for the audit; by default the user of this process, and its host.

        On a running task, a worker that is no longer in `specific_worker_ids` stops; `ping_interval_ms` applies from the next
        ping; all other fields from the next claim. A `ping_interval_ms` that follows from `worker_timeout_ms` goes on doing so.
        """
        who = audit.author(by)
        if not changes:
            return await self.get(name, key)
        while True:
            before = (await self.get(name, key)).task_option
            expected, after = before.stored(), before.changed(**changes).stored()
            # What was requested, and what follows from it.
            changed = {*changes, *(field for field in after if after[field] != expected.get(field))}
            written = await control.set_option(
                self._store, task_id(name, key), {field: after.get(field) for field in changed}, expected
            )
            if written is not None:
                await audit.note(self._store, "task.set_option", who, name=name, key=key, changes=dict(changes))
                return await self._as_written(written)

    async def signal(
        self, name: str, key: str, event: str, payload: Any = UNSAID, *, signal_id: str | None = None
    ) -> None:
        """Tell the task that something has happened, for its handler's `wait_for(event)`. See `TaskMesh.signal`."""
        id_ = task_id(name, key)
        checked_step_name("the event of a signal", event)
        given = {} if payload is UNSAID else payload
        if given is None:
            raise UnstorableValue(
                f"signal {event!r}: payload=None would be taken for a timeout: leave payload out, or send a value like False"
            )
        if signal_id is not None:
            checked_text("signal_id", signal_id)
        stored = Returns(f"the payload of signal {event!r}", root="payload").to_store(given)
        stored = self._connection.payloads.sealed(id_, "record", stored)
        size = len(encoded({"payload": stored})) + len(event.encode()) + _SIZE_OF_A_SIGNAL
        if size > signals.MAX_BYTES:
            raise TooManySignals(
                f"the payload of signal {event!r} has {size} bytes, more than the {signals.MAX_BYTES} that fit: store it "
                "elsewhere and send a reference"
            )
        signal = signals.Signal(id_, event, signal_id or str(new_id()), stored, size)
        answer = await self._change(id_, lambda: self._connection.signals.send(signal))
        if answer == "absent":
            raise no_such_task(name, key)
        if answer == "finished":
            task = await self.get(name, key)
            raise TaskFinished(
                f"task {name!r} {key!r} is finished ({task.status}), so signal {event!r} would reach nobody"
            )
        if answer == "full":
            raise TooManySignals(
                f"task {name!r} {key!r} has no room for more unconsumed signals (at most {signals.MAX_SIGNALS:,}, or "
                f"{signals.MAX_BYTES:,} bytes, or what fits into a MongoDB document): send {event!r} again when its handler "
                "has consumed some"
            )

    async def finished(
        self, name: str, key: str, timeout: float | None, *, published: bool = False, not_before: float | None = None
    ) -> Task:
        """Wait until the task is finished, and return it. Raises `TaskNotFound`, `TimeoutError`, `InvalidOption`.

        `timeout`: 0 is one look. `published`: the caller has just published it, so that it may be past its retention already.
        `not_before`: when it did not exist yet, on the monotonic clock.
        """
        results, id_, seconds = self._connection.results, task_id(name, key), checked_timeout(timeout)
        document: Document | None = None
        if seconds is not None and seconds <= 0:
            document = await results.at_once(id_, published=published)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    document = await results.finished(id_, published=published, not_before=not_before)
        if document is None:
            raise TimeoutError(f"task {name!r} {key!r} has not finished within {timeout} s")
        return await self._read(document)


def no_such_task(name: str, key: str) -> TaskNotFound:
    """Return the error for a task that no reader sees."""
    return TaskNotFound(
        f"there is no task {name!r} {key!r}: it was never published, was deleted, or is past its retention"
    )
