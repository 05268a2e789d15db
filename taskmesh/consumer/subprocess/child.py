"""The inside of a child process for `run="process"` handlers: one call at a time, until the parent hangs up.

The guarantees are described in `processes`, the parent's half of a call in `conversation`. The two talk over one
socket: the parent sends a `Call`, the child messages that are only data (`wire`). A child ends with its parent, however
that ends: it sees the end of the lifeline. And it ends with its call's lease, whatever its parent does: both see in
shared memory until when that lasts.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

from taskmesh.client.definition import TaskDefinition
from taskmesh.client.handle import TaskHandle
from taskmesh.client.params import Params, checked_size
from taskmesh.client.returns import PLAIN, Returns
from taskmesh.client.tracing import Carrier, going_on
from taskmesh.consumer.durable.transactions import End, Record, blocking_again, blocking_block, blocking_step_again
from taskmesh.consumer.logs import SetUp, set_up
from taskmesh.consumer.run.context import BlockingTaskContext, enter
from taskmesh.consumer.run.outcome import deciding
from taskmesh.consumer.run.recording import Started
from taskmesh.consumer.run.report import checked_progress, line_of
from taskmesh.consumer.subprocess.handler_reference import HandlerRef, found
from taskmesh.consumer.subprocess.wire import PutAside, configuration_as_data, error_as_data, packed
from taskmesh.model.errors import LeaseLost, TaskError, TaskMeshError, TaskSuspended
from taskmesh.model.option import TaskOption
from taskmesh.model.stage import Next
from taskmesh.model.task import checked_key, checked_name
from taskmesh.store.blocking import BlockingStore, StoreAddress, blocking_client
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document

serving = False
"""Whether this process is such a child. It must not become a worker itself if a script forgets to guard its main part."""

_STARTED_AT_ONCE_BYTES = 4_000_000
_SIZE_OF_THE_REST = 1_000
"""The size of a child task beside its params: its key, and rather too much than too little."""
_LOAD = pickle.loads  # what is loaded was written by our own parent


@dataclass(frozen=True)
class Call:
    """One execution, as its child process needs to know it."""

    handler: HandlerRef
    params: Mapping[str, Any]
    name: str
    key: str
    worker_id: str
    running_id: str
    attempt: int
    failures: int
    option: TaskOption
    extra: Mapping[str, Any] = field(default_factory=dict)
    trace: Carrier | None = None
    """The execution's position in its trace."""
    log: SetUp | None = None
    """How the parent logs, if it has called `logs.set_up`."""


LEASE = struct.Struct("dd")
"""Shared with the parent: until when (monotonic, one clock for the whole machine) the call may go on, which the parent writes;
and, if not 0, when the child considered that to be over."""
_LOOK_EVERY_S = 0.1


class Lease:
    """The lease of the running call, by this process's own clock: it ends even if the parent is suspended and does not say so."""

    def __init__(self, fd: int) -> None:
        self._shared = mmap.mmap(fd, LEASE.size)
        os.close(fd)
        self._busy = threading.Event()
        threading.Thread(target=self._watch, name="taskmesh lease", daemon=True).start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """End this process, and all that it started, if the lease ends before the block does."""
        self._busy.set()
        try:
            yield
        finally:
            self._busy.clear()

    def over(self) -> bool:
        """Whether it is over. If so, the parent knows from now on that the handler was told."""
        until, told = LEASE.unpack_from(self._shared)
        now = time.monotonic()
        if not told and now >= until:
            struct.pack_into("d", self._shared, 8, now)
        return bool(told) or now >= until

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            if self.over():
                os.killpg(os.getpgrp(), signal.SIGKILL)
            left_s = LEASE.unpack_from(self._shared)[0] - time.monotonic()
            # Not all of it at once: after a `transaction()` that failed it is shorter than it was.
            time.sleep(min(max(left_s, 0.0), _LOOK_EVERY_S))


class Remote:
    """The execution as the handler's context sees it (`context.Running`), with the real one in the parent."""

    def __init__(self, call: Call, connection: Connection, lease: Lease) -> None:
        self.name = call.name
        self.key = call.key
        self.worker_id = call.worker_id
        self.running_id = call.running_id
        self.attempt = call.attempt
        self.failures = call.failures
        self.option = call.option
        self.extra = call.extra
        self.in_a_block = False
        """Whether a `transaction()` is open, whose result can be set."""
        self.result: Any = None
        self.returns: Returns = PLAIN
        """What the handler returns, once it is found."""
        self._connection = connection
        self._lease = lease
        self._lock = threading.Lock()
        self._over = False

    @property
    def deadline(self) -> datetime | None:
        """When `run_timeout_ms` is over. It counts from the handler's start, so only the parent knows."""
        deadline: datetime | None = self.ask("deadline")
        return deadline

    @property
    def state(self) -> Any:
        """There is none: what a worker opens in its event loop is useless in another process."""
        raise TaskMeshError(
            "there is no state in a child process: @mesh.lifespan is opened in the worker's; open what a handler with "
            "run='process' needs at the top of its module, or in a function under @functools.cache, once for each child"
        )

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop. Hardly ever seen: a process is killed at once."""
        return self._lease.over() or bool(self.ask("cancelled"))

    def set_progress(self, fraction: float, message: str | None) -> None:
        """Report progress."""
        self.ask("progress", *checked_progress(fraction, message))

    def log(self, message: str) -> None:
        """Keep a line. It needs no answer, so it costs little. What a thread logs after the handler's end is dropped."""
        with self._lock:
            if not self._over:
                self._connection.send_bytes(packed("log", line_of(message)))

    def publish_in_thread(self, definition: Any, key: str, params: Mapping[str, Any]) -> None:
        """Publish with the SUCCESS. The params are checked here, where their annotated types are known."""
        if isinstance(definition, TaskDefinition):
            after = definition.configuration.given_after
            if after is None:
                after = self.ask("after", definition.name, checked_key(key))
            stored, _ = definition.params.to_store(params, after)
            self.ask(
                "publish", definition.name, configuration_as_data(definition.configuration), checked_key(key), stored
            )
        else:
            name, stored = checked_name(definition), dict(params)
            checked_size(name, stored)
            self.ask("publish", name, None, checked_key(key), stored)

    def blocking_dependencies(self) -> dict[tuple[str, str], Any]:
        """Return the results of the task's dependencies."""
        found: dict[tuple[str, str], Any] = self.ask("dependencies")
        return found

    def set_result(self, value: Any) -> None:
        """Keep the result until a `transaction()` ends."""
        self.result = value

    @property
    def ledger(self) -> RemoteLedger:
        """The execution's journal, which is in the parent."""
        return RemoteLedger(self)

    @contextmanager
    def blocking_transaction(self) -> Iterator[Any]:
        """Open a block that commits together with the SUCCESS, on a client of this process's own."""
        address: bytes = self.ask("address")
        store = _store_at(address)
        with blocking_block(store, _Side(self)) as session:
            yield session

    def blocking_in_transaction(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn` in such a block, and again after each conflict."""
        address: bytes = self.ask("address")
        return blocking_again(_store_at(address), _Side(self), self, fn)

    def ask(self, question: str, *arguments: Any) -> Any:
        """Ask the parent. Raises the error with which it refuses."""
        with self._lock:
            if self._over:
                raise LeaseLost(f"task {self.name!r} {self.key!r}: this execution has ended already")
            self._connection.send_bytes(packed(question, *arguments))
            answer, error = self._connection.recv()
        if isinstance(error, PutAside):
            raise TaskSuspended(error.kind, error.name)
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Say nothing more: the next message to the parent is the outcome."""
        with self._lock:
            self._over = True


class RemoteLedger:
    """The journal of the execution, with the real one in the parent."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def begin_step(self, name: str, made_by: str, outer: str | None) -> tuple[str, Document | None]:
        """Return the step's id, and what is recorded of it; None if it has to be done now."""
        id_, record = self._remote.ask("begin_step", name, made_by, outer)
        return id_, record

    def end_step(self, id_: str, fields: Document | None) -> Document | None:
        """Record the step, if there is something to record."""
        record: Document | None = self._remote.ask("end_step", id_, fields)
        return record

    def in_transaction(self, id_: str, fn: Callable[[Any], Document]) -> Document:
        """Run it in a transaction that commits together with its record, on a client of this process's own."""
        return blocking_step_again(_store_at(self._remote.ask("address")), _StepSide(self._remote, id_), fn)

    def start(
        self, definition: Any, params_by_key: Mapping[str, Mapping[str, Any]], *, detached: bool
    ) -> list[TaskHandle[Any]]:
        """Start children of the task. Their handles serve only `results` here: this process has no connection of its own."""
        name, returns, configuration = checked_name(getattr(definition, "name", definition)), PLAIN, None
        if isinstance(definition, TaskDefinition):
            returns, configuration = definition.returns, configuration_as_data(definition.configuration)
        stored: dict[str, dict[str, Any]] = {}
        messages: list[list[Any]] = [[]]
        room = _STARTED_AT_ONCE_BYTES
        for key, params in params_by_key.items():
            if isinstance(definition, TaskDefinition):
                stored[checked_key(key)], size = definition.params.to_store(
                    params, definition.configuration.given_after
                )
            else:
                stored[checked_key(key)] = dict(params)
                size = checked_size(name, stored[key])
            room -= size + _SIZE_OF_THE_REST
            if room < 0 and messages[-1]:
                messages.append([])
                room = _STARTED_AT_ONCE_BYTES - size
            messages[-1].append([key, stored[key]])
        created: list[bool] = []
        for pairs in messages:
            created += self._remote.ask("start", name, configuration, pairs, detached)
        nowhere: Any = None
        return [
            TaskHandle(nowhere, name, key, created=bool(new), returns=returns)
            for key, new in zip(stored, created, strict=True)
        ]

    def results(self, handles: Sequence[Started], *, return_errors: bool) -> list[Any]:
        """Wait for children, and return their values."""
        pairs = [[handle.name, handle.key] for handle in handles]
        found = self._remote.ask("results", pairs, return_errors)
        return [
            value if isinstance(value, TaskError) else handle.read(value)
            for handle, value in zip(handles, found, strict=True)
        ]

    def sleep(self, name: str, ms: int | None, when: datetime | None, outer: str | None) -> None:
        """See `BlockingTaskContext.sleep`."""
        self._remote.ask("sleep", name, ms, when, outer)

    def wait_for(self, event: str, timeout_ms: int | None, outer: str | None) -> Any:
        """See `BlockingTaskContext.wait_for`."""
        return self._remote.ask("wait_for", event, timeout_ms, outer)


class _StepSide:
    """The parent's side of a `transactions.StepSide`."""

    def __init__(self, remote: Remote, id_: str) -> None:
        self._remote = remote
        self._id = id_

    async def begin(self, session_id: Any) -> float:
        return float(self._remote.ask("step_begins", self._id, session_id))

    async def outcome(self, fields: Document) -> tuple[str, Outcome]:
        found: tuple[str, Outcome] = self._remote.ask("step_outcome", self._id, fields)
        return found

    async def end(self, outcome: Outcome | None) -> Document:
        record: Document = self._remote.ask("step_ends", self._id, outcome is not None)
        return record


class _Side:
    """The parent's side of a `transactions.Side`."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def begin(self, session_id: Any) -> float:
        limit_s = float(self._remote.ask("begin", session_id))
        self._remote.in_a_block = True
        self._remote.result = None  # what a failed block has published is dropped with it
        return limit_s

    async def record(self) -> Record:
        found: Record = self._remote.ask("record", self._remote.returns.to_store(self._remote.result))
        return found

    async def end(self, how: End) -> None:
        self._remote.in_a_block = False
        self._remote.ask("end", how)


@functools.lru_cache(maxsize=4)
def _store_at(pickled: bytes) -> BlockingStore:
    address: StoreAddress = _LOAD(pickled)
    return BlockingStore(blocking_client(address), address.database, address.collection)


def main(connection_fd: int, lifeline_fd: int, lease_fd: int) -> None:
    """Serve calls until the parent hangs up."""
    global serving  # noqa: PLW0603 — a fact about this process
    serving = True
    _end_with_the_parent(lifeline_fd)
    _leave_signals_to_the_parent()
    lease = Lease(lease_fd)
    connection = Connection(connection_fd)
    with suppress(ConnectionError):  # the parent has hung up already
        connection.send_bytes(packed("up"))
    while True:
        try:
            call: Call = connection.recv()
            with lease.held():
                connection.send_bytes(_answer(call, connection, lease))
        except (EOFError, ConnectionError):
            return


def _end_with_the_parent(lifeline_fd: int) -> None:
    """Kill this process and all that it started when the parent is gone.

    On Linux the kernel does it, even if a handler is in native code and holds the interpreter; elsewhere a thread.
    """
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_the_end, args=[lifeline_fd], name="taskmesh lifeline", daemon=True).start()


def _wait_for_the_end(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _leave_signals_to_the_parent() -> None:
    """Do nothing at SIGINT and SIGTERM: a terminal and a service manager send them to us, too, but the parent decides.

    By handlers that do nothing, not SIG_IGN, which the programs that a task starts would inherit. What it forks has the
    previous handlers, since it is ended by signals: a pool of `multiprocessing` would wait for its processes for ever.
    """
    before = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

    mask = set[signal.Signals | int]()

    def hold_back() -> None:
        """Hold signals back until the fork can receive them: it may be ended as soon as it exists."""
        nonlocal mask
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def hear_as_before() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        let_through()

    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=hear_as_before)


def _do_nothing(_number: int, _frame: Any) -> None: ...


def _answer(call: Call, connection: Connection, lease: Lease) -> bytes:
    """Run the handler, and return the outcome as it is sent."""
    remote = Remote(call, connection, lease)
    if call.log is not None:
        set_up(*call.log)
    try:
        handler, args, kwargs = _prepared(call)
        remote.returns = Returns(f"the result of task {call.name!r}", handler)
        enter(BlockingTaskContext(remote))
        connection.send_bytes(packed("begins"))
        with going_on(call.trace):
            value = handler(*args, **kwargs)
        if isinstance(value, Next):
            raise value  # noqa: TRY301 — returned or raised, it says the same
        return packed("returned", remote.returns.to_store(value))
    except BaseException as error:  # noqa: BLE001 — whatever a handler raises, SystemExit too, is its outcome
        return packed("raised", error_as_data(deciding(error)))  # the parent cannot look into groups
    finally:
        remote.end()


def _prepared(call: Call) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Find the handler, and convert the stored params to its arguments."""
    handler = call.handler
    if handler.pickled is not None:
        fn, args, kwargs = _LOAD(handler.pickled)
        return fn, args, kwargs
    fn = found(handler)
    args, kwargs = Params(call.name, fn).to_run(dict(call.params))
    return fn, args, kwargs
