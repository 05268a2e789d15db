"""The journal: what an execution does only once, and what it waits for. `current_task().step`, `sleep`, `wait_for`, `start`.

After every end but SUCCESS a handler is called again from its first line. It gets what its journal has recorded, instead of
doing it again. A record is written before `step` returns, fenced like an outcome; records that different executions make at one
moment go out as one update (`finisher`).

A handler that waits for long is suspended: from then on that is the outcome of its execution, whatever it does; steps under way
are recorded first; the handler unwinds; and the task is put aside. In that update the server checks once more whether the event
has happened, so nothing that happens in between is lost.

If the process dies before a record is written, the step runs again; after it, never. If it dies while it suspends, the lease
runs out, and the handler comes to the same wait again, with the end that its first call has fixed.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.to_thread
from pymongo.errors import PyMongoError

from taskmesh.client.handle import TaskHandle
from taskmesh.consumer import crash_points
from taskmesh.consumer.durable.journal_in_thread import InThread, done_in_loop
from taskmesh.consumer.durable.starts import StartedTogether, Starts
from taskmesh.consumer.durable.together import MAX_PUBLICATIONS
from taskmesh.consumer.durable.transactions import Transactions
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.fingerprint import fingerprint
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.run.recording import (
    Entry,
    Started,
    checked_ms,
    failed,
    inside,
    not_callable,
    returns_of,
    step_under_way,
    stored,
    value_of,
)
from taskmesh.consumer.run.stop_reasons import Stop
from taskmesh.model.dependency import label
from taskmesh.model.errors import (
    InvalidOption,
    LeaseLost,
    StepMismatch,
    TaskError,
    TaskFailed,
    TaskMeshError,
    TaskSuspended,
    TaskTooLarge,
)
from taskmesh.model.ids import checked_step_name
from taskmesh.model.task import task_id
from taskmesh.store import Store, steps
from taskmesh.store.clock import ServerClock
from taskmesh.store.control import restore_children
from taskmesh.store.find import UNFINISHED
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document, restored
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, patiently
from taskmesh.store.payloads import Payloads
from taskmesh.store.publication import Publication
from taskmesh.store.relations import children
from taskmesh.store.relations.dependencies import naming
from taskmesh.store.renew import end_lease
from taskmesh.store.values import cleaned, encoded

logger = logging.getLogger("taskmesh.journal")

T = TypeVar("T")
MAX_VALUE_BYTES = 1_000_000
MAX_RECORDS_BYTES = 8_000_000
_SIZE_OF_THE_REST = 300
"""About how many bytes a record has beside its value."""
_LONGEST_SHOWN = 100
_ENDS_WITHIN_S = 30.0
"""How long a failed handler waits for its other steps before they are cancelled."""
_IN_PLACE_S = 1.0
"""Waits that are no longer than this are spent in place."""
_PAUSE_S = 0.05


class Journals:
    """The journals of one consumer's executions."""

    def __init__(
        self, store: Store, worker_id: str, finisher: Finisher, transactions: Transactions, clock: ServerClock
    ) -> None:
        self.store = store
        self.finisher = finisher
        self.transactions = transactions
        self.started_together = StartedTogether(store, worker_id, clock)
        self.pending = children.Pending(store)
        self.ends = children.Ends(store)
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        self.threads = anyio.CapacityLimiter(1)
        """As many as there are plain functions of steps at work: the slots of the consumer are the limit."""
        self.at_work = 0

    def open(self, execution: Execution) -> Journal:
        """Return a new journal for an execution."""
        return Journal(self, execution)

    def in_thread(self, execution: Execution) -> InThread:
        """Return the journal's interface for a handler in a thread."""
        return InThread(self.loop, self.transactions, execution)

    def done_in_loop(self, doing_it: Coroutine[Any, Any, T]) -> T:
        """See `journal_in_thread.done_in_loop`."""
        return done_in_loop(self.loop, doing_it)


class Journal:
    """What one execution has recorded, and what the executions before it have. Belongs to the event loop."""

    def __init__(self, journals: Journals, execution: Execution) -> None:
        self._journals = journals
        self._execution = execution
        self._counts: Counter[tuple[str, str]] = Counter()
        self._pending: dict[tuple[str, str], Entry] = {}
        self._under_way: set[Entry] = set()
        """Steps whose functions are running. A suspension waits for their records."""
        self._begun: dict[str, Entry] = {}
        """Steps of a blocking handler, by their ids."""
        self._changed = asyncio.Event()
        self._suspending = False
        self._ends = False
        self._records: dict[str, Document] | None = None
        self._bytes = 0
        self._loading = asyncio.Lock()
        self._exclusive = asyncio.Lock()
        """Held by whoever writes to the task. A transactional step holds it while its transaction lasts."""
        self._in_transaction = False
        self._last_moment = datetime.min.replace(tzinfo=UTC)
        self._made_by: Document = {
            "worker_id": execution.worker_id,
            "running_id": execution.running_id,
            "attempt": execution.attempt,
        }
        self._starts = Starts(journals.started_together, execution.id, self)

    # --- what a handler in the event loop calls ---

    def step(
        self, name: str, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, transactional: bool
    ) -> Coroutine[Any, Any, Any]:
        """See `TaskContext.step`. The number behind the name is assigned at once, before anything is awaited."""
        return self._step(self.step_entry(name, fn, args, kwargs), fn, args, kwargs, transactional=transactional)

    async def _step(
        self,
        entry: Entry,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        transactional: bool,
    ) -> Any:
        returns = returns_of(entry.name, fn)
        entry.task = asyncio.current_task()
        try:
            record = await self.look_up(entry)
            if record is None and transactional:
                transactions = self._journals.transactions
                record = await transactions.step_in_loop(self._execution, self, entry, fn, args, kwargs)
            elif record is None:
                cancelled: asyncio.CancelledError | None = None
                try:
                    with inside(entry.name):
                        value, cancelled = await self._called(fn, args, kwargs)
                except TaskFailed as error:
                    record = await self.write(entry, failed(error))
                else:
                    record = await self.write(entry, stored(returns, value))
                if cancelled is not None:
                    raise cancelled
            return value_of(record, returns)
        finally:
            self.leave(entry)

    async def begin_step(self, name: str, made_by: str, outer: str | None) -> tuple[str, Document | None]:
        """Note that a blocking handler asks for a step. Return its id, and what is recorded of it."""
        entry = self.entry("step", name, made_by, outer=outer)
        try:
            record = await self.look_up(entry)
        except BaseException:
            self.leave(entry)
            raise
        self._begun[entry.id] = entry
        return entry.id, record

    def begun(self, id_: str) -> Entry:
        """Return the step with this id that is under way."""
        return self._begun[id_]

    async def end_step(self, id_: str, fields: Document | None) -> Document | None:
        """Record what has come of such a step. With nothing to record, it was not completed."""
        entry = self._begun[id_]
        if fields is None:
            self._over(entry)
            return None
        try:
            return await self.write(entry, fields)
        finally:
            self._over(entry)

    def _over(self, entry: Entry) -> None:
        self._begun.pop(entry.id, None)
        self.leave(entry)

    async def _called(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, asyncio.CancelledError | None]:
        """Call the function of a step. A plain function runs in a thread, as a plain handler does.

        A thread cannot be cancelled: what it completes nevertheless is returned, to be recorded, with the cancellation.
        """
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004  # the method itself is asked
            return await fn(*args, **kwargs), None
        journals = self._journals
        journals.at_work += 1
        journals.threads.total_tokens = max(journals.threads.total_tokens, journals.at_work)
        running = journals.loop.create_task(
            anyio.to_thread.run_sync(lambda: fn(*args, **kwargs), limiter=journals.threads)
        )
        try:
            value = await asyncio.shield(running)
        except asyncio.CancelledError as cancelled:
            await asyncio.wait([running])  # nothing interrupts a thread: its end is the end of this execution
            if running.exception() is not None or inspect.isawaitable(running.result()):
                raise
            return running.result(), cancelled
        finally:
            journals.at_work -= 1
        return (await value if inspect.isawaitable(value) else value), None

    async def sleep(self, name: str, ms: int | None, when: datetime | None, outer: str | None = None) -> None:
        """See `TaskContext.sleep` and `sleep_until`: one of the two is given. `outer`: the step in which it is called."""
        entry = self.entry("sleep", name, outer=outer)
        try:
            record = await self.look_up(entry)
            if record is None:
                record = await self.write(entry, {} if when is None else {"until": when}, delay_ms=ms)
                if ms is not None:
                    record["until"] = self._journals.clock.now() + timedelta(milliseconds=ms)
        finally:
            self.leave(entry)
        left_s = (record["until"] - self._journals.clock.now()).total_seconds()
        if 0 < left_s <= _IN_PLACE_S:
            await asyncio.sleep(left_s)
        elif left_s > 0:
            await self.suspend({"id": entry.id, "kind": "sleep", "name": entry.name})

    async def wait_for(self, event: str, timeout_ms: int | None, outer: str | None = None) -> Any:
        """See `TaskContext.wait_for`."""
        entry = self.entry("wait", event, outer=outer)
        wait: Document = {"id": entry.id, "kind": "wait", "name": entry.name, "event": event}
        try:
            record = await self.look_up(entry)
            if timeout_ms is not None:
                checked_ms("timeout_ms", timeout_ms)
            if record is None and self._has_to_suspend(timeout_ms):
                # This saves an update: the one that suspends the task records the wait, and sees what has happened meanwhile.
                wait |= {"record": (await self.outcome(entry, {})).step, "timeout_ms": timeout_ms}
            elif record is None or record.get("time") is None:
                record = await self._take_signal(entry, event, timeout_ms)
        finally:
            self.leave(entry)
        if record is None or record.get("time") is None:
            await self.suspend(wait)
        return record["value"]

    def _has_to_suspend(self, timeout_ms: int | None) -> bool:
        """Whether no signal had come when the task was claimed, and its wait does not end at once."""
        signalled = self._execution.document["task_state"].get("signals_bytes")
        return not signalled and (timeout_ms is None or timeout_ms > 1000 * _IN_PLACE_S)

    # --- children ---

    async def start(
        self, definition: Any, params_by_key: Mapping[str, Mapping[str, Any]], *, detached: bool
    ) -> list[TaskHandle[Any]]:
        """See `TaskContext.start_many`. All are checked before any is written."""
        self._check()
        self._check_place(step_under_way())
        publisher = self._execution.publisher
        definition = await publisher.resolved(definition)
        name = definition.name
        ids = {task_id(name, key): key for key in params_by_key}
        if (after := definition.configuration.after) and ids and self._execution.id in after.ids:
            raise InvalidOption(
                f"task {label(next(iter(ids)))} cannot wait for {label(self._execution.id)}, which starts it: its result would "
                "never come. Publish it with current_task().publish, which takes effect with this task's SUCCESS"
            )
        entries = [Entry("start", id_, id_, steps.record_id("start", 1, id_), None) for id_ in ids]
        try:
            new = dict.fromkeys([entry.name for entry in entries if await self.look_up(entry) is None])
            publications: list[Publication] = []
            for id_ in new:
                publication = publisher.publication_of(definition, ids[id_], params_by_key[ids[id_]])
                publication.parent, publication.detached = self._execution.id, detached
                publications.append(publication)
                if len(publications) % MAX_PUBLICATIONS == 0:
                    await asyncio.sleep(0)  # so that pings and others get their turn
            await self._starts.add(publications)
        finally:
            for entry in entries:
                self.leave(entry)
        return [publisher.handle_of(definition, name, key, created=id_ in new) for id_, key in ids.items()]

    async def results(self, handles: Sequence[Started], *, return_errors: bool) -> list[Any]:
        """See `TaskContext.results`."""
        ids = [task_id(handle.name, handle.key) for handle in handles]
        entry = self.entry("join", _name_of_join(ids))
        try:
            record = await self.look_up(entry)
            known = await self._read()
            for handle, id_ in zip(handles, ids, strict=True):
                if steps.record_id("start", 1, id_) not in known:
                    raise TaskMeshError(
                        f"{self._label}: results() takes what start() returned, and {handle!r} was not started by this task: "
                        "wait for other tasks by after="
                    )
            known_to_fail = set(dict(record["value"])) if record is not None else set[str]()
            awaited = [id_ for id_ in ids if id_ not in known_to_fail]
            may_be_unfinished = record is None
            while True:
                if may_be_unfinished and (left := await self._unfinished(awaited)):
                    self.leave(entry)
                    count = f"{left} task{'' if left == 1 else 's'}"
                    await self.suspend({"id": entry.id, "kind": "join", "name": count})
                stored = await patiently(lambda: self._journals.ends.of(ids))
                ends = [(id_, stored[id_]) for id_ in awaited if id_ in stored]
                if cancelled := [id_ for id_, end in ends if end["with_parent"]]:
                    self._execution.check_lease()  # it was retried after it ended, and this handler goes on without that
                    await patiently(partial(restore_children, self._journals.store, cancelled, self._execution.id))
                elif may_be_unfinished or not any(end["status"] in UNFINISHED for _, end in ends):
                    break
                may_be_unfinished = True  # somebody has retried it since its end was recorded
            found = await self._payloads.ends(
                self._journals.store, [stored[id_] for id_ in dict.fromkeys(ids) if id_ in stored]
            )
            if record is None:
                errors = [[id_, text] for id_ in dict.fromkeys(ids) if (text := error_of(id_, found.get(id_)))]
                record = await self.write(entry, {"value": errors, "error": errors[0][1]} if errors else {"value": []})
        finally:
            self.leave(entry)
        failed_ones: dict[str, str] = dict(record["value"])
        values: list[Any] = []
        for handle, id_ in zip(handles, ids, strict=True):
            if (text := failed_ones.get(id_) or error_of(id_, found.get(id_))) is not None:
                error = TaskError(text, list(found.get(id_, {}).get("reasons", ())))
                if not return_errors:
                    raise error
                values.append(error)
            else:
                values.append(handle.read(found[id_].get("value")))
        return values

    async def _unfinished(self, ids: Sequence[str]) -> int:
        """Count the children that this task has to wait for. They name it as a dependent, and so will wake it."""
        return await patiently(lambda: self._linked(set(ids))) if ids else 0

    async def _linked(self, ids: AbstractSet[str]) -> int:
        store, parent = self._journals.store, self._execution.id
        while True:
            found = (await self._journals.pending.of([parent], len(ids))).get(parent, {})
            if await children.name_parent(store, found, ids, parent, naming({"$literal": [parent]})):
                return len(ids & found.keys())

    @property
    def _payloads(self) -> Payloads:
        return self._execution.publisher.payloads

    @property
    def lease_until(self) -> float:
        """Until when (monotonic) its writes count."""
        return self._execution.lease_until

    # --- a record: requested, written ---

    def step_entry(self, name: str, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry:
        """Note that a step is requested. Raises nothing: errors are raised where the step is awaited."""
        if not callable(fn):
            entry = self.entry("step", name)
            entry.refused = entry.refused or not_callable(name, fn)
            return entry
        return self.entry("step", name, fingerprint(fn, args, kwargs))

    def entry(self, kind: str, name: str, made_by: str | None = None, *, outer: str | None = None) -> Entry:
        """Note that something is requested, and assign the number behind its name."""
        try:
            checked_step_name("the event of a signal" if kind == "wait" else f"the name of a {kind}", name)
            self._check_place(outer or step_under_way())
        except TaskMeshError as error:
            return Entry(kind, str(name), "", "", made_by, error)
        self._counts[kind, name] += 1
        number = self._counts[kind, name]
        shown = name if number == 1 else f"{name}#{number}"
        entry = Entry(kind, shown, name, steps.record_id(kind, number, name), made_by)
        other = self._pending.get((kind, name))
        if other is not None:
            entry.refused = StepMismatch(
                f"{self._label}: two of its {kind}s named {name!r} are under way at once ({other.fingerprint or other.name} and "
                f"{made_by or shown}), so their records could be exchanged: give each a name of its own, like "
                f'f"{name}-{{i}}"'
            )
        else:
            self._pending[kind, name] = entry
        return entry

    async def look_up(self, entry: Entry) -> Document | None:
        """Return what is recorded of it, or None if it has to be done now. Raises what makes it impossible."""
        self._check()
        if entry.refused is not None:
            raise entry.refused
        while self._suspending:  # until it is known whether the execution goes on
            self._changed.clear()
            await self._changed.wait()
            self._check()
        record = (await self._read()).get(entry.id)
        if record is None:
            if self._ends:
                raise LeaseLost(f"{self._label}: this execution has failed, so it begins nothing any more")
            self._under_way.add(entry)
            return None
        if entry.kind == "step" and record.get("fingerprint") != entry.fingerprint:
            raise StepMismatch(
                f"{self._label}: the step {entry.name!r} was recorded of {record.get('fingerprint')}, and is asked for as "
                f"{entry.fingerprint} (a function, and a hash of its arguments): give the new step another name, or start over "
                "with retry(…, fresh=True)"
            )
        return record

    async def _read(self) -> dict[str, Document]:
        """Return the records. They came with the claim, unless they are large."""
        if self._records is not None:
            return self._records
        async with self._loading:
            if self._records is None:
                execution, state = self._execution, self._execution.document["task_state"]
                found = state.get("steps")
                if found is None and state.get("steps_bytes"):
                    found = await patiently(lambda: steps.read(self._journals.store, execution.id))
                records = [self._payloads.unsealed_record(execution.id, restored(record)) for record in found or ()]
                self._records = {}
                for record in records:
                    self._keep(record)
            return self._records

    async def write(self, entry: Entry, fields: Document, *, delay_ms: int | None = None) -> Document:
        """Write a record and return it. Raises `LeaseLost`, `TaskTooLarge`, and `TaskFailed` if there are too many."""
        async with self._exclusive:
            outcome = await self.outcome(entry, fields, delay_ms=delay_ms)
            if not await self._journals.finisher.record_step(outcome):
                await self._refused(outcome)
            return self.remember(outcome)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Write nothing else to the task during the block: that would abort the block's transaction."""
        async with self._exclusive:
            self._in_transaction = True
            try:
                yield
            finally:
                self._in_transaction = False

    async def outcome(self, entry: Entry, fields: Document, *, delay_ms: int | None = None) -> Outcome:
        """Return what has to be written: the record, and what made it. Raises as `write` does."""
        execution = self._execution
        if execution.judged:
            raise LeaseLost(f"{self._label}: this execution has ended, so it records nothing any more")
        if entry.kind == "step" and crash_points.asked_for and crash_points.is_reached(entry.name):
            await self._crash(entry)
        size = await self._checked_size(entry, fields)
        sealed = self._payloads.sealed_record(execution.id, fields)
        made: Document = {"id": entry.id, "kind": entry.kind, "name": entry.name, **sealed, "size": size}
        if entry.fingerprint is not None:
            made["fingerprint"] = entry.fingerprint
        made |= self._made_by
        lease_ms = int(execution.stored_option["worker_timeout_ms"])
        return Outcome(
            execution.id,
            execution.running_id,
            "stepped",
            step=made,
            lease_ms=lease_ms,
            made_at=self._moment(),
            bytes_before=self._bytes,
            delay_ms=delay_ms,
            size=size,
        )

    def _moment(self) -> datetime | None:
        """Return the server's time as we know it, later than the last one; None if we do not know it."""
        clock = self._journals.clock
        if clock.aged:  # after a suspension of the machine nothing is recorded any more
            return None
        self._last_moment = max(clock.now(), self._last_moment + timedelta(milliseconds=1))
        return self._last_moment

    async def started(self, ids: Sequence[str]) -> Outcome:
        """Return what has to be written when these children are started. Raises as `write` does."""
        entry = Entry("start", ids[0], ids[0], steps.record_id("start", 1, ids[0]), None)
        return await self.outcome(entry, {"names": list(ids)})

    async def _crash(self, entry: Entry) -> None:
        """Lose the task as if the worker had died here a lease ago, so that the next worker that looks takes it over."""
        execution = self._execution
        await patiently(lambda: end_lease(self._journals.store, execution.id, execution.running_id))
        execution.stop(Stop.LEASE_LOST)
        raise LeaseLost(f"{self._label}: its worker was lost by kill_at({entry.name!r})")

    async def _checked_size(self, entry: Entry, fields: Document) -> int:
        value_size = len(encoded(fields))
        if value_size > MAX_VALUE_BYTES:
            raise TaskTooLarge(
                f"{self._label}: the value of the {entry.kind} {entry.name!r} has {value_size} bytes, more than the "
                f"{MAX_VALUE_BYTES} that fit: store it elsewhere and return a reference"
            )
        size = value_size + _SIZE_OF_THE_REST + 2 * len(entry.name.encode())
        await self._read()
        if self._bytes + size > MAX_RECORDS_BYTES:
            raise TaskFailed(
                f"with the {entry.kind} {entry.name!r} the records of {self._label} would have {self._bytes + size} bytes, more "
                f"than the {MAX_RECORDS_BYTES} that fit together: return references from steps, or pass work on to other tasks"
            )
        return size

    async def _refused(self, outcome: Outcome) -> None:
        """The record was not written: raise why."""
        answers = await patiently(lambda: steps.whether_recorded(self._journals.store, [outcome]))
        if answers[outcome] == "held":
            raise TaskFailed(
                f"{self._label}: MongoDB refuses the record {outcome.step['name'] if outcome.step else ''!r}: the task would be "
                "too large with it: return references from steps, and pass references in params"
            )
        if answers[outcome] == "lost":
            raise self.lost()

    def lost(self) -> LeaseLost:
        """Return the error for an execution that has lost its task."""
        return LeaseLost(f"{self._label}: the lease was lost, so this execution records nothing any more")

    def remember(self, outcome: Outcome) -> Document:
        """Keep what has been written, and return it."""
        if "names" in (outcome.step or {}):
            self._execution.document["task_state"]["has_children"] = True
        record = self._payloads.unsealed_record(self._execution.id, dict(outcome.step or {}))
        if self._records is not None:
            self._keep(record)
        return record

    def _keep(self, record: Document) -> None:
        """Note a record. A record of several children is noted under the name of each."""
        assert self._records is not None
        self._bytes += record["size"]
        ids = [steps.record_id("start", 1, name) for name in record.get("names", ())] or [record["id"]]
        self._records.update(dict.fromkeys(ids, record))

    def leave(self, entry: Entry) -> None:
        """Note that an entry is over, however it ended."""
        if self._pending.get((entry.kind, entry.given)) is entry:
            del self._pending[entry.kind, entry.given]
        self._under_way.discard(entry)
        self._changed.set()

    async def _take_signal(self, entry: Entry, event: str, timeout_ms: int | None) -> Document:
        """Look for the signal, again and again while the database is unreliable.

        A repeated call returns what the server has done.
        """
        async with self._exclusive:
            outcome = await self.outcome(entry, {})
            while True:
                try:
                    record = await steps.take_signal(self._journals.store, outcome, event, timeout_ms)
                except PyMongoError as error:
                    falters = is_passing(error) or is_over_deadline(error)
                    if not falters or time.monotonic() >= self._execution.lease_until:
                        raise
                    await asyncio.sleep(_PAUSE_S)
                else:
                    break
        if record is None:
            raise self.lost()
        record = self._payloads.unsealed_record(self._execution.id, record)
        known = await self._read()
        self._bytes += record["size"] - known.get(entry.id, {}).get("size", 0)
        known[entry.id] = record
        return record

    # --- the end ---

    async def end_steps(self) -> None:
        """Let no new step begin, and wait until those under way are recorded, since their functions are at work.

        This is for a handler that fails beside them: otherwise the next execution would call them while they still run. Steps
        that take long are cancelled, as far as that is possible.
        """
        self._ends = True
        cancelling = self._journals.loop.call_later(_ENDS_WITHIN_S, self._cancel_steps)
        try:
            while self._under_way:
                self._changed.clear()
                await self._changed.wait()
        finally:
            cancelling.cancel()

    def _cancel_steps(self) -> None:
        text = "%s has failed, and its step %r goes on for more than %g s beside that: cancelling it"
        for entry in self._under_way:
            logger.warning(text, self._label, entry.name, _ENDS_WITHIN_S)
            if entry.task is not None:
                entry.task.cancel()

    # --- suspension ---

    async def suspend(self, wait: Document) -> NoReturn:
        """Suspend the task as soon as the steps under way are recorded. Always raises `TaskSuspended`."""
        while self._suspending:
            self._changed.clear()
            await self._changed.wait()
            self._check()
        self._suspending = True
        try:
            while self._under_way:
                self._changed.clear()
                await self._changed.wait()
            self._execution.check_lease()
            self._execution.suspend(wait)
        finally:
            self._suspending = False
            self._changed.set()
        raise TaskSuspended(wait["kind"], wait["name"])

    def _check(self) -> None:
        """Raise what keeps this execution from recording and from waiting."""
        execution = self._execution
        execution.check_goes_on()
        if (workers := execution.stored_option["concurrent_worker_cnt"]) > 1:
            raise TaskMeshError(
                f"{self._label}: steps, sleeps and waits need concurrent_worker_cnt=1, and it is {workers}: several workers "
                "would take each other's records for their own"
            )
        if (execution.writes_held_back and not self._in_transaction) or execution.recorded:
            raise TaskMeshError(
                f"{self._label}: nothing can be recorded or waited for inside transaction() or after it: do so before, or use "
                "step(…, transactional=True)"
            )

    def _check_place(self, outer: str | None) -> None:
        if outer is not None:
            raise TaskMeshError(
                f"{self._label}: a step, sleep or wait was asked for inside the step {outer!r}: what a step does is recorded as "
                "one; call it from the handler"
            )

    @property
    def _label(self) -> str:
        return f"task {self._execution.name!r} {self._execution.key!r}"


def _name_of_join(ids: Sequence[str]) -> str:
    """Return the name of the record that all these children have ended: it follows from which they are."""
    each = sorted(set(ids))
    name = f"results of {each[0]}" if len(each) == 1 else f"results of {len(each)}"
    if len(each) == 1 and len(name) <= _LONGEST_SHOWN:
        return name
    digest = hashlib.sha256("\0".join(each).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:_LONGEST_SHOWN]} ({digest[:12]})"


def error_of(id_: str, end: Document | None) -> str | None:
    """Say how a child ended that did not succeed. None if it did."""
    name, _, key = id_.partition(":")
    if end is None:
        return (
            f"the child {name!r} {key!r} no longer exists: it was deleted, or this task had ended and the child's retention was "
            "over; start over with retry(…, fresh=True)"
        )
    if end["status"] == "SUCCESS":
        return None
    reasons = "; ".join(reason.partition("\n")[0] for reason in end["reasons"])
    return cleaned(f"the child {name!r} {key!r} ended as {end['status']}{': ' + reasons if reasons else ''}")
