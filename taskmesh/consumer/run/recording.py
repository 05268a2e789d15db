"""A record in the making: what the event loop, threads and child processes have in common when a handler records something.

A `Recorder` keeps records (`journal.Journal`); blocking handlers reach it through a `Ledger`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from taskmesh.client.handle import TaskHandle
from taskmesh.client.returns import OF_ONE_FORM, Returns
from taskmesh.consumer.run.fingerprint import fingerprint
from taskmesh.model.dependency import is_named
from taskmesh.model.errors import MAX_DURATION_MS, InvalidOption, TaskFailed
from taskmesh.model.ids import shown
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.values import cleaned, decoded, encoded

_inside: ContextVar[str | None] = ContextVar("taskmesh step under way", default=None)
"""The step whose function is running. Inside it nothing else may be recorded."""


@dataclass(eq=False, slots=True)
class Entry:
    """One call of a handler that has to be recorded."""

    kind: str
    name: str
    """The name as it is shown: the second of one name is `name#2`."""
    given: str
    id: str
    fingerprint: str | None
    refused: Exception | None = None
    """Why it cannot be made. Raised when it is awaited."""
    task: asyncio.Task[Any] | None = None
    """What awaits it, for a step in the event loop."""


# --- who keeps records ---


class Started(Protocol):
    """What `start` returned: a `TaskHandle`, or its name in the process that talks to a child process."""

    # ruff: noqa: D102 — each is the handle's property or method of that name

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    def read(self, stored: Any) -> Any: ...


class Recorder(Protocol):
    """The journal of an execution, as its handler and its transactions see it."""

    # ruff: noqa: D102 — each is the `Journal`'s method of its name

    def step(
        self, name: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, transactional: bool
    ) -> Coroutine[Any, Any, Any]: ...
    async def start(
        self, definition: Any, params_by_key: Mapping[str, Mapping[str, Any]], *, detached: bool
    ) -> list[TaskHandle[Any]]: ...
    async def results(self, handles: Sequence[Started], *, return_errors: bool) -> list[Any]: ...
    async def sleep(self, name: str, ms: int | None, when: datetime | None, outer: str | None = None) -> None: ...
    async def wait_for(self, event: str, timeout_ms: int | None, outer: str | None = None) -> Any: ...
    async def end_steps(self) -> None: ...

    # for blocking handlers
    async def begin_step(self, name: str, made_by: str, outer: str | None) -> tuple[str, Document | None]: ...
    async def end_step(self, id_: str, fields: Document | None) -> Document | None: ...
    def begun(self, id_: str) -> Entry: ...

    # for what commits together with its record
    @property
    def lease_until(self) -> float: ...
    def transaction(self) -> AbstractAsyncContextManager[None]: ...
    async def outcome(self, entry: Entry, fields: Document) -> Outcome: ...
    async def started(self, ids: Sequence[str]) -> Outcome: ...
    async def write(self, entry: Entry, fields: Document) -> Document: ...
    def remember(self, outcome: Outcome) -> Document: ...


class Ledger(Protocol):
    """A journal for blocking handlers: in a thread here, or at the other end of a pipe."""

    # ruff: noqa: D102 — each is the `Journal`'s method of its name

    def begin_step(self, name: str, made_by: str, outer: str | None) -> tuple[str, Document | None]: ...
    def end_step(self, id_: str, fields: Document | None) -> Document | None: ...
    def in_transaction(self, id_: str, fn: Callable[[Any], Document]) -> Document: ...
    def start(
        self, definition: Any, params_by_key: Mapping[str, Mapping[str, Any]], *, detached: bool
    ) -> list[TaskHandle[Any]]: ...
    def results(self, handles: Sequence[Started], *, return_errors: bool) -> list[Any]: ...
    def sleep(self, name: str, ms: int | None, when: datetime | None, outer: str | None) -> None: ...
    def wait_for(self, event: str, timeout_ms: int | None, outer: str | None) -> Any: ...


# --- a step, and what it records ---


class inside:  # noqa: N801 -- a context manager; one by a generator takes several times as long
    """The function of this step runs inside this block."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = _inside.set(self._name)

    def __exit__(self, *_: object) -> None:
        _inside.reset(self._token)


def returns_of(name: str, fn: Any) -> Returns:
    """Return what the function of a step returns."""
    return Returns(f"the value of step {name!r}", fn if callable(fn) else None, "value")


def stored(returns: Returns, value: Any) -> Document:
    """Return the value as a field of a record, as later executions will read it. Raises `UnstorableValue`."""
    document, _ = returns.kept("value", value)
    if type(document) is dict and type(document["value"]) in OF_ONE_FORM:
        return document
    return decoded(encoded(document))


def failed(error: TaskFailed) -> Document:
    """Return the field of a record that says that a step failed for good."""
    return {"error": cleaned(str(error) or "TaskFailed")}


def value_of(record: Document, returns: Returns) -> Any:
    """Return what the step of this record returned, or raise what it raised."""
    if (error := record.get("error")) is not None:
        raise TaskFailed(error)
    return returns.read(record["value"])


def not_callable(name: str, fn: Any) -> TypeError:
    """Return the error for a value that cannot be called."""
    hint = (
        ": pass the function and its arguments, step(name, fn, *args), not its call" if inspect.isawaitable(fn) else ""
    )
    return TypeError(f"step {name!r}: fn must be callable, got {type(fn).__name__}{hint}")


def checked_handles(handles: Any) -> list[Any]:
    """Return the handles of children. Raises `TypeError` for anything else."""
    listed = isinstance(handles, Iterable) and not isinstance(handles, (str, bytes, Mapping))
    found = list(handles) if listed else []
    if wrong := [each for each in found if not is_named(each)] or ([] if listed else [handles]):
        raise TypeError(f"results() takes a list of what start() returned, like [handle], got {shown(wrong[0])}")
    return found


def checked_ms(what: str, ms: Any) -> int:
    """Return milliseconds. Raises `InvalidOption`."""
    if isinstance(ms, bool) or not isinstance(ms, int) or not 0 <= ms <= MAX_DURATION_MS:
        raise InvalidOption(
            f"{what} must be a whole number of milliseconds from 0 to {MAX_DURATION_MS} (ten years), got {ms!r:.100}"
        )
    return ms


def duration_ms(parts: Mapping[str, Any]) -> int:
    """Return the total of the parts of a `timedelta` in milliseconds. Raises `InvalidOption`."""
    try:
        ms = timedelta(**parts) / timedelta(milliseconds=1)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidOption(f"sleep() takes parts of a timedelta, like hours=24, got {parts!r:.100}: {error}") from None
    if not parts or not 0 <= ms <= MAX_DURATION_MS:
        raise InvalidOption(f"sleep() takes a time of 0 to ten years, like hours=24, got {parts!r:.100}")
    return round(ms)


def checked_moment(when: Any) -> datetime:
    """Return the moment in UTC, as it is stored. A naive one is taken as UTC. Raises `InvalidOption`."""
    if not isinstance(when, datetime):
        raise InvalidOption(f"sleep_until() takes a datetime, got {when!r:.100}")
    moment = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def step_under_way() -> str | None:
    """Return the name of the step whose function is running here, if one is."""
    return _inside.get()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def blocking_step(
    ledger: Ledger,
    name: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    transactional: bool,
) -> Any:
    """See `BlockingTaskContext.step`."""
    returns = returns_of(name, fn)
    if not callable(fn):
        raise not_callable(name, fn)
    id_, record = ledger.begin_step(name, fingerprint(fn, args, kwargs), step_under_way())

    def made(**session: Any) -> Document:
        with inside(name):
            value = fn(*args, **kwargs, **session)
            return stored(returns, asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)

    ended = False
    """Whether `end_step` was called. It ends the step even if it raises that nothing can be recorded."""
    try:
        if record is None:
            fields: Document | None = None
            try:
                if transactional:
                    record = ledger.in_transaction(id_, lambda session: made(session=session))
                else:
                    fields = made()
            except TaskFailed as error:
                fields = failed(error)
            if fields is not None:
                ended = True
                record = ledger.end_step(id_, fields)
    finally:
        if not ended:
            ledger.end_step(id_, None)
    return value_of(record or {}, returns)
