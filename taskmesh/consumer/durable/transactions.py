"""Transactions that end with an execution's SUCCESS: `current_task().transaction()`, and SUCCESS with what it published.

MongoDB refuses a transaction's write to a document that anybody has changed since the transaction's first statement. So, while
a handler is in such a block, nobody here may write to its task: pings and reports pause, and before that the lease is extended
to as long as the server lets a transaction live (docs/decisions/0010-transactions-and-leases.md).

If the process dies in the block, nothing of it remains, and the task runs again when the extended lease is over. If it dies
after the commit, both the handler's writes and the SUCCESS are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from pymongo.errors import OperationFailure, PyMongoError

from taskmesh.consumer.durable.together import Successes, commit, lost, write
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.outcome import stored_success
from taskmesh.consumer.run.pinger import Pinger
from taskmesh.consumer.run.recording import Entry, Recorder, failed, inside, returns_of, stored
from taskmesh.consumer.run.reporter import Reporter
from taskmesh.consumer.timing import random_up_to
from taskmesh.model.errors import (
    LeaseLost,
    Retry,
    Snooze,
    TaskFailed,
    TaskMeshError,
    TransactionConflict,
)
from taskmesh.model.stage import Next
from taskmesh.store import Store, steps
from taskmesh.store.blocking import BlockingStore, StoreAddress, run_now
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document, maybe, settings_of
from taskmesh.store.mongodb.server_errors import is_over_deadline, is_passing, is_transaction_gone, patiently
from taskmesh.store.publication import Publication
from taskmesh.store.renew import Extensions

_DEFAULT_LIMIT_S = 60.0
_LEASE_BEYOND_LIMIT_S = 5.0
_PING_AFTER_LIMIT_S = 1.0
_TRANSIENT = "TransientTransactionError"
_PAUSE_S = 0.05


_IN_PLACE_S = 120.0
"""How long `in_transaction` tries again after conflicts, like the driver's `with_transaction`."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 0.5

End = Literal["recorded", "failed", "conflicted"]
"""How a block ended."""


@dataclass(frozen=True)
class Record:
    """What a transaction writes beside the handler's own writes: the SUCCESS, and the tasks to publish."""

    worker_id: str
    outcome: Outcome
    publications: Sequence[Publication]
    now: datetime


class Side(Protocol):
    """The execution, as a transaction needs it: here, or at the other end of a pipe."""

    async def begin(self, session_id: Any) -> float:
        """Extend the lease. Return how many seconds a transaction may last. Raises `LeaseLost`."""

    async def record(self) -> Record:
        """Decide the outcome: nothing stops the execution any more. Raises `LeaseLost`, `UnstorableValue`."""

    async def end(self, how: End) -> None:
        """Go on as before, or as a recorded execution. What was published in a block that conflicted is dropped."""


class Transactions:
    """The transactions of one consumer's executions."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        clock: ServerClock,
        pinger: Pinger,
        reporter: Reporter,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._clock = clock
        self._pinger = pinger
        self._reporter = reporter
        self._successes = Successes(store, worker_id, clock)
        self._extensions = Extensions(store)
        self._loop = asyncio.get_running_loop()
        self._limit_s: float | None = None
        self._opening = asyncio.Lock()
        self._blocking: BlockingStore | None = None
        self._closing: Any = None

    # --- in the event loop ---

    @asynccontextmanager
    async def in_loop(self, execution: Execution) -> AsyncIterator[Any]:
        """See `TaskContext.transaction`."""
        async with (
            self._store.driver.session() as session,
            _block(self._store, session, _Here(self, execution), asyncio.sleep),
        ):
            yield session

    async def again_in_loop(self, execution: Execution, fn: Callable[[Any], Any]) -> Any:
        """See `TaskContext.in_transaction`."""
        async with self._store.driver.session() as session:
            return await _again(self._store, session, _Here(self, execution), execution, fn, asyncio.sleep)

    async def step_in_loop(
        self,
        execution: Execution,
        journal: Recorder,
        entry: Entry,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Document:
        """Call the function of a step with `session=`, and commit what it writes together with the record. Return the record."""
        returns = returns_of(entry.name, fn)

        async def made(session: Any) -> Document:
            with inside(entry.name):
                return stored(returns, await maybe(fn(*args, session=session, **kwargs)))

        try:
            async with journal.transaction(), self._store.driver.session() as session:
                side = _StepHere(self, execution, journal, entry)
                return await _step_again(self._store, session, side, made, asyncio.sleep)
        except TaskFailed as error:
            return await journal.write(entry, failed(error))

    def step_in_thread(
        self, execution: Execution, journal: Recorder, entry: Entry, made: Callable[[Any], Document]
    ) -> Document:
        """Make a transactional step for a handler in a thread, with a session of a blocking client."""
        caller = self.side(execution)
        return blocking_step_again(caller.call(self._blocking_store()), self.step_side(execution, journal, entry), made)

    def step_side(self, execution: Execution, journal: Recorder, entry: Entry) -> _StepFromThread:
        """Return the step's side for a thread other than the event loop's."""
        return _StepFromThread(_StepHere(self, execution, journal, entry), self.side(execution))

    async def record(self, execution: Execution, outcome: Outcome) -> None:
        """See `Successes.record_success`."""
        await self._successes.record_success(execution, outcome)

    # --- in a thread ---

    @contextmanager
    def in_thread(self, execution: Execution) -> Iterator[Any]:
        """See `BlockingTaskContext.transaction`."""
        side = self.side(execution)
        with blocking_block(side.call(self._blocking_store()), side) as session:
            yield session

    def again_in_thread(self, execution: Execution, fn: Callable[[Any], Any]) -> Any:
        """See `BlockingTaskContext.in_transaction`."""
        side = self.side(execution)
        return blocking_again(side.call(self._blocking_store()), side, execution, fn)

    def side(self, execution: Execution) -> _FromThread:
        """Return the execution's side for a thread other than the event loop's."""
        return _FromThread(_Here(self, execution), self._loop)

    def address(self) -> StoreAddress:
        """Where a child process finds the store."""
        driver = self._store.driver
        return StoreAddress(settings_of(driver.client), driver.database.name, self._store.tasks)

    async def _blocking_store(self) -> BlockingStore:
        async with self._opening:  # several threads may be the first
            if self._blocking is None:
                database = await asyncio.to_thread(self._store.driver.sync_database)
                self._blocking = BlockingStore(database.client, database.name, self._store.tasks, self._store.now)
                self._blocking.numbers = self._store.numbers
                self._closing = database.client
            return self._blocking

    async def close(self) -> None:
        """Close the blocking client, if there is one of ours."""
        if self._closing is not None:
            await asyncio.to_thread(self._closing.close)

    # --- what a side does here ---

    async def begin(self, execution: Execution) -> float:
        """Hold back other writes to the task, and extend its lease."""
        execution.check_lease()
        if execution.writes_held_back or execution.recorded:
            raise RuntimeError(f"task {execution.name!r} {execution.key!r}: an execution has one transaction")
        limit_s = await self._lifetime_limit_s()
        lease_s = max(execution.stored_option["worker_timeout_ms"] / 1000, limit_s + _LEASE_BEYOND_LIMIT_S)
        execution.writes_held_back = True
        try:
            await self._reporter.written()
            await self._pinger.pause_pings(execution, limit_s + _PING_AFTER_LIMIT_S)
            if not await self._extended(execution, lease_s):
                raise _lost(execution.name, execution.key)  # noqa: TRY301 — undoes what was begun
        except BaseException:
            self.resume(execution)
            raise
        return limit_s

    async def _extended(self, execution: Execution, lease_s: float) -> bool:
        """Extend the lease. Tries again while the database is unreliable, as long as the current lease lasts."""
        while True:
            sent = time.monotonic()
            try:
                held = await self._extensions.extend(execution.id, execution.running_id, int(lease_s * 1000))
            except PyMongoError as error:
                falters = is_passing(error) or is_over_deadline(error)
                if not falters or time.monotonic() >= execution.lease_until:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                if held:
                    execution.leased(sent, lease_s)
                return held

    def decide(self, execution: Execution) -> Record:
        """Decide that the execution SUCCEEDs. Nothing stops it any more, except for a transaction that fails."""
        if execution.judged:
            raise _lost(execution.name, execution.key)
        if told := execution.commit():
            raise LeaseLost(
                f"task {execution.name!r} {execution.key!r}: {told.value}, so nothing of the transaction remains"
            )
        outcome = stored_success(execution, execution.result)
        return Record(self._worker_id, outcome, execution.publications, self._clock.now())

    def resume(self, execution: Execution) -> None:
        """Ping and report as before."""
        execution.commit_failed()
        execution.write_again()

    def abandoned(self, execution: Execution) -> None:
        """End the transaction of a process that died in it, from a thread: what it has written is locked until then."""
        if execution.writes_held_back and not execution.recorded:
            with suppress(PyMongoError, RuntimeError):  # the server does it by itself when the limit is over
                self.side(execution).call(self._store.driver.admin({"killSessions": [execution.session_id]}))

    async def _lifetime_limit_s(self) -> float:
        if self._limit_s is None:
            try:
                asked = {"getParameter": 1, "transactionLifetimeLimitSeconds": 1}
                reply = await patiently(lambda: self._store.driver.admin(asked))
                self._limit_s = float(reply["transactionLifetimeLimitSeconds"])
            except OperationFailure:  # not everybody may ask, and a sharded cluster has no answer
                self._limit_s = _DEFAULT_LIMIT_S
        return self._limit_s


class _Here:
    """The side of an execution in this process, in the event loop."""

    def __init__(self, transactions: Transactions, execution: Execution) -> None:
        self._transactions = transactions
        self._execution = execution

    async def begin(self, session_id: Any) -> float:
        self._execution.session_id = session_id
        self._execution.published_before = len(self._execution.publications)
        limit_s = await self._transactions.begin(self._execution)
        self._execution.result = None  # what a failed block has published is dropped with it
        return limit_s

    async def record(self) -> Record:
        return self._transactions.decide(self._execution)

    async def end(self, how: End) -> None:
        if how == "recorded":
            self._execution.recorded = True
            return
        if how == "conflicted":
            self._execution.publications = list(self._execution.publications[: self._execution.published_before])
        self._transactions.resume(self._execution)


class _FromThread:
    """A transaction of a handler that runs in a thread: each call goes through the event loop."""

    def __init__(self, here: _Here, loop: asyncio.AbstractEventLoop) -> None:
        self._here = here
        self._loop = loop

    def call(self, coroutine: Any) -> Any:
        """Run it in the loop, and wait."""
        try:
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed, and nobody will ever run it
            coroutine.close()
            raise
        return running.result()

    async def begin(self, session_id: Any) -> float:
        return float(self.call(self._here.begin(session_id)))

    async def record(self) -> Record:
        found: Record = self.call(self._here.record())
        return found

    async def end(self, how: End) -> None:
        self.call(self._here.end(how))


# --- a step whose writes commit together with its record ---


class StepSide(Protocol):
    """The journal of an execution, as a transactional step needs it: here, or at the other end of a pipe."""

    async def begin(self, session_id: Any) -> float:
        """Write nothing else to the task, and extend the lease. Return how many seconds a transaction may last."""

    async def outcome(self, fields: Document) -> tuple[str, Outcome]:
        """Return the worker's id, and the record to write. Raises as `Journal.outcome` does."""

    async def end(self, outcome: Outcome | None) -> Document:
        """Write as before, and remember the record, if it was written."""


class _StepHere:
    """The side of a step in the event loop."""

    def __init__(self, transactions: Transactions, execution: Execution, journal: Recorder, entry: Entry) -> None:
        self._transactions = transactions
        self._execution = execution
        self._journal = journal
        self._entry = entry

    async def begin(self, session_id: Any) -> float:
        self._execution.session_id = session_id
        return await self._transactions.begin(self._execution)

    async def outcome(self, fields: Document) -> tuple[str, Outcome]:
        return self._execution.worker_id, await self._journal.outcome(self._entry, fields)

    async def end(self, outcome: Outcome | None) -> Document:
        self._transactions.resume(self._execution)
        return {} if outcome is None else self._journal.remember(outcome)


class _StepFromThread:
    """A step of a handler that runs in a thread. The thread is occupied as long as the step lasts."""

    def __init__(self, here: _StepHere, caller: _FromThread) -> None:
        self._here = here
        self._caller = caller

    async def begin(self, session_id: Any) -> float:
        return float(self._caller.call(self._here.begin(session_id)))

    async def outcome(self, fields: Document) -> tuple[str, Outcome]:
        found: tuple[str, Outcome] = self._caller.call(self._here.outcome(fields))
        return found

    async def end(self, outcome: Outcome | None) -> Document:
        record: Document = self._caller.call(self._here.end(outcome))
        return record


def blocking_step_again(store: BlockingStore, side: StepSide, made: Callable[[Any], Document]) -> Document:
    """Make a record in a transaction on a blocking client."""
    with store.driver.client.start_session() as session:
        return run_now(_step_again(store, session, side, made, _sleep))


async def _step_again(
    store: Store,
    session: Any,
    side: StepSide,
    made: Callable[[Any], Any],
    pause: Callable[[float], Awaitable[None]],
) -> Document:
    """Make a record in a transaction, and write it there; again after each conflict, for as long as `in_transaction` does."""
    give_up = time.monotonic() + _IN_PLACE_S
    longest = _FIRST_WAIT_S
    while True:
        limit_s = await side.begin(session.session_id)
        started = time.monotonic()
        outcome: Outcome | None = None
        record: Document = {}
        ours = False
        try:
            await store.driver.start_transaction(session)
            fields = await maybe(made(session))
            ours = True
            worker_id, outcome = await side.outcome(fields)
            if not await steps.record(store, worker_id, [outcome], session=session):
                raise lost(outcome.id)  # noqa: TRY301 — undoes what was begun
            await commit(store, session, pause)
        except BaseException as error:
            outcome = None
            met = _met(error)
            _raise_if_too_long(met, error, started, limit_s)
            conflicted = met is not None and (met.has_error_label(_TRANSIENT) or (ours and is_over_deadline(met)))
            if not conflicted or time.monotonic() > give_up:
                raise
        finally:
            try:
                await store.driver.abort(session)
            finally:
                record = await side.end(outcome)
        if outcome is not None:
            return record
        await pause(random_up_to(longest))
        longest = min(longest * 1.5, _LONGEST_WAIT_S)


def _raise_if_too_long(met: PyMongoError | None, error: BaseException, started: float, limit_s: float) -> None:
    """Raise an error that says so, if the server has ended the transaction since it lasted too long."""
    if met is not None and is_transaction_gone(met) and time.monotonic() - started >= limit_s:
        raise TaskMeshError(
            f"the server ended the transaction, which had lasted {time.monotonic() - started:.0f} s: it may last "
            f"transactionLifetimeLimitSeconds={limit_s:.0f}; do slow work before the block"
        ) from error


# --- the block itself, for all sides ---


@contextmanager
def blocking_block(store: BlockingStore, side: Side) -> Iterator[Any]:
    """The block, on a blocking client: yields the session."""
    with store.driver.client.start_session() as session:
        block = _block(store, session, side, _sleep)
        run_now(block.__aenter__())
        try:
            yield session
        except BaseException as error:
            run_now(block.__aexit__(type(error), error, error.__traceback__))
            raise
        run_now(block.__aexit__(None, None, None))


def blocking_again(store: BlockingStore, side: Side, running: Repeating, fn: Callable[[Any], Any]) -> Any:
    """Call `fn` in the block, on a blocking client, and again after each conflict."""
    with store.driver.client.start_session() as session:
        return run_now(_again(store, session, side, running, fn, _sleep))


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 — runs in a thread, by `run_now`


@asynccontextmanager
async def _block(
    store: Store, session: Any, side: Side, pause: Callable[[float], Awaitable[None]]
) -> AsyncIterator[None]:
    limit_s = await side.begin(session.session_id)
    started = time.monotonic()
    how: End = "failed"
    ours = committing = False
    try:
        await store.driver.start_transaction(session)
        yield
        record = await side.record()
        ours = True
        await write(store, session, record.worker_id, [record.outcome], record.publications, record.now)
        committing = True
        await commit(store, session, pause)
        how = "recorded"
    except Exception as error:
        met = _met(error)
        if met is None:
            raise
        _raise_if_too_long(met, error, started, limit_s)
        undone = ours and (is_over_deadline(met) or (is_passing(met) and not committing))
        if not (undone or met.has_error_label(_TRANSIENT)):
            raise
        how = "conflicted"
        text = str(met).partition(", full error")[0]
        raise TransactionConflict(f"the transaction is undone, and may go well another time: {text}") from error
    finally:
        try:
            await store.driver.abort(session)
        finally:
            await side.end(how)


class Repeating(Protocol):
    """The execution, as `in_transaction` needs it."""

    result: Any

    @property
    def cancelled(self) -> bool: ...  # noqa: D102 — see `context.Running`


async def _again(
    store: Store,
    session: Any,
    side: Side,
    running: Repeating,
    fn: Callable[[Any], Any],
    pause: Callable[[float], Awaitable[None]],
) -> Any:
    """Call `fn` in the block, and again after each conflict. Return what it returns: the result, unless it has set one."""
    give_up = time.monotonic() + _IN_PLACE_S
    longest = _FIRST_WAIT_S
    while True:
        try:
            async with _block(store, session, side, pause):
                value = await maybe(fn(session))
                if running.result is None:
                    running.result = value
        except TransactionConflict:
            if running.cancelled or time.monotonic() > give_up:
                raise
        else:
            return value
        await pause(random_up_to(longest))
        longest = min(longest * 1.5, _LONGEST_WAIT_S)


def _met(error: BaseException) -> PyMongoError | None:
    """Return the driver's error that this one is, or was raised from: libraries and handlers wrap them.

    None for what a handler raises to say how it ends: then it has judged the error itself.
    """
    if isinstance(error, PyMongoError):
        return error
    if isinstance(error, (TaskFailed, Retry, Snooze, Next)):
        return None
    if isinstance(error, BaseExceptionGroup):
        found = [met for part in error.exceptions if (met := _met(part)) is not None]
        return next((met for met in found if met.has_error_label(_TRANSIENT)), found[0] if found else None)
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None if origin is None else _met(origin)


def _lost(name: str, key: str) -> LeaseLost:
    return LeaseLost(f"task {name!r} {key!r}: the lease was lost, so nothing of the transaction remains")
