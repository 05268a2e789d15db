"""Child processes for `run="process"` handlers: a crash, a hang or a leak there hurts one execution.

A child runs one call at a time and is used again after it. It is killed, with all that its handler started, the moment its
execution is cancelled, times out or loses its lease; and it ends with this process, even if that is killed by force.
Why these are our own and no library's: docs/decisions/0009-child-processes.md.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import bson

from taskmesh.consumer.child import Call, HandlerRef
from taskmesh.consumer.execution import Execution
from taskmesh.consumer.reasons import ReasonElsewhere
from taskmesh.consumer.transactions import Transactions
from taskmesh.definition import TaskDefinition
from taskmesh.errors import LeaseLost, Retry, Snooze, TaskFailed
from taskmesh.store.blocking import run_now
from taskmesh.store.driver import CODEC

MAX_IDLE = max(4, os.cpu_count() or 1)
"""Children kept for the next call. One costs the memory of an interpreter with the handlers' modules."""
_LOOK_EVERY_S = 0.2
_MAX_ENDING_S = 2.0
_STARTS_TRIED = 3
_BOOT = (
    "import sys; _, *fds = sys.argv[:3]; sys.path[:], sys.argv[1:] = sys.argv[3:], []; "
    "from taskmesh.consumer.child import main; main(*map(int, fds))"
)


class ProcessDied(Exception):
    """The process of a handler ended before the handler did. The text names its exit code or signal."""


class HandlerError(Exception):
    """Stands for an error that was raised in a child process and could not be brought over."""


class Child:
    """One child process. Made and used in threads; `kill` may be called from anywhere."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._our_lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(lifeline), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                start_new_session=True,  # a group of its own: no signals of our terminal, and killed as a whole
            )
        finally:
            theirs.close()
            os.close(lifeline)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.used = False

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._popen.pid

    def receive(self) -> tuple[Any, ...]:
        """Wait for what it says next. Raises `EOFError` once it is gone."""
        # Not by the end of the socket alone: what the handler started may hold that open after the handler's death.
        while not self.connection.poll(_LOOK_EVERY_S):
            if self._popen.poll() is not None and not self.connection.poll(0):
                raise EOFError
        return self.connection.recv()  # type: ignore[no-any-return]

    def kill(self) -> None:
        """Kill it at once, and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill what is left of it, and return its exit code, or minus the signal that ended it."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_LOOK_EVERY_S)  # one that is about to end by itself tells why
        self.kill()
        code = self._popen.wait()
        self.connection.close()
        self._close_lifeline()
        return code

    def hang_up(self) -> None:
        """Let an idle one know that it is not needed any more."""
        self.connection.close()

    def dismiss(self) -> None:
        """Let an idle one end by itself, so that its exit handlers run; not for long."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_MAX_ENDING_S)
        self.kill()
        self._popen.wait()
        self._close_lifeline()

    def disown(self) -> None:
        """Forget it, in a fork of the process that it belongs to."""
        self._popen.returncode = 0  # not our child: nobody here waits for it
        self.connection.close()
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        os.close(self._our_lifeline)


_pools: weakref.WeakSet[Processes] = weakref.WeakSet()


class Processes:
    """The children of one consumer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._closed = False
        _pools.add(self)

    async def call(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the handler in a child, and return or raise what it does. Cancellation kills the child.

        Raises `ProcessDied` if the child ends before its handler.
        """
        conversation = _Conversation(self, execution, definition, args, kwargs)
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def converse() -> Callable[[], Any]:
            try:
                return conversation.run()
            finally:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(done.set)

        try:
            # A limiter of its own, so without a limit: an execution holds a slot of the consumer, and that is the limit.
            outcome = await anyio.to_thread.run_sync(converse, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except asyncio.CancelledError:
            conversation.kill()
            with anyio.CancelScope(shield=True), anyio.move_on_after(_MAX_ENDING_S):
                await done.wait()  # so that it is really gone when its slot is free
            raise
        return outcome()

    def take(self) -> Child:
        """Return a child that is free."""
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        with self._lock:
            self._busy.add(child)
        return child

    def give_back(self, child: Child) -> None:
        """Keep a child for the next call, unless there are enough."""
        with self._lock:
            self._busy.discard(child)
            keep = len(self._idle) < MAX_IDLE and not self._closed
            if keep:
                child.used = True
                self._idle.append(child)
        if not keep:
            threading.Thread(target=child.dismiss, name="taskmesh child ends", daemon=True).start()

    def bury(self, child: Child) -> int:
        """Be done with a child that died or is to die; return its exit code."""
        with self._lock:
            self._busy.discard(child)
        return child.end()

    @property
    def pids(self) -> list[int]:
        """The children there are."""
        with self._lock:
            return [child.pid for child in (*self._idle, *self._busy)]

    async def close(self) -> None:
        """End the idle children; one that is still busy goes as soon as it is done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.hang_up()  # all first, so that they end side by side
        for child in idle:
            await anyio.to_thread.run_sync(child.dismiss)

    def disown(self) -> None:
        """Forget all children: they belong to the process from which this one was forked."""
        self._lock = threading.Lock()
        for child in (*self._idle, *self._busy):
            child.disown()
        self._idle, self._busy = [], set()


def _disown_all() -> None:
    for pool in _pools:
        pool.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


class _Conversation:
    """One call in a child, as a thread of the parent leads it."""

    def __init__(
        self,
        pool: Processes,
        execution: Execution,
        definition: TaskDefinition[Any, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._pool = pool
        self._execution = execution
        self._definition = definition
        self._arguments = (args, kwargs)
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._killed = False

    def kill(self) -> None:
        """Kill the child, or see to it that there will be none."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def run(self) -> Callable[[], Any]:
        """Lead the conversation to its end, and return what returns or raises the outcome."""
        call = self._call()
        for _ in range(_STARTS_TRIED):
            child = self._pool.take()
            with self._lock:
                self._child = child
                if self._killed:
                    child.kill()
            try:
                child.connection.send(call)
                child.receive()  # that it has started
            except (EOFError, OSError):
                was_used = child.used
                code = self._buried(child)
                if was_used and not self._killed:
                    continue  # died of something else while it was idle; this call has not begun
                return _raising(ProcessDied(f"the handler's process could not be started: {_how_it_ended(code)}"))
            try:
                outcome = self._listen(child)
            except (EOFError, OSError):
                code = self._buried(child)
                if self._execution.session_id is not None:
                    self._execution.transactions.abandoned(self._execution)
                return _raising(ProcessDied(f"the handler's process {_how_it_ended(code)}"))
            self._release(child)
            return outcome
        return _raising(ProcessDied("the handler's process could not be started: idle ones died one after the other"))

    def _buried(self, child: Child) -> int:
        with self._lock:
            self._child = None
        return self._pool.bury(child)

    def _release(self, child: Child) -> None:
        with self._lock:
            self._child = None
            killed = self._killed
        if killed:  # cancelled in the very moment of its end: it is dead or dying
            self._pool.bury(child)
        else:
            self._pool.give_back(child)

    def _call(self) -> Call:
        execution = self._execution
        return Call(
            handler=reference(self._definition, *self._arguments),
            params=execution.document.get("params") or {},
            name=execution.name,
            key=execution.key,
            worker_id=execution.worker_id,
            running_id=execution.running_id,
            attempt=execution.attempt,
            option=execution.option,
            deadline=execution.deadline,
        )

    def _listen(self, child: Child) -> Callable[[], Any]:
        """Answer what the child asks, until it tells the outcome."""
        while True:
            kind, *said = child.receive()
            if kind == "returned":
                value = bson.decode(said[0], CODEC)["value"]
                return lambda: value
            if kind == "raised":
                return _raising(_brought_over(*said))
            if kind == "log":
                self._execution.log(*said)
                continue
            try:
                answer, error = self._answer(kind, said), None
            except Exception as refusal:  # noqa: BLE001 — it is raised where it was asked for, in the child
                answer, error = None, refusal
            child.connection.send((answer, error))

    def _answer(self, question: str, said: list[Any]) -> Any:
        execution = self._execution
        if question == "cancelled":
            return execution.cancelled
        if question == "progress":
            return execution.set_progress(*said)
        if question == "publish":
            definition, configuration, key, params = said
            return execution.add_publication(self._published(definition, configuration), key, params)
        transactions: Transactions = execution.transactions
        if question == "address":
            return pickle.dumps(transactions.address())
        side = transactions.side(execution)
        if question == "begin":
            return run_now(side.begin(*said))
        if question == "record":
            execution.set_result(bson.decode(said[0], CODEC)["value"])
            return run_now(side.record())
        if question == "end":
            return run_now(side.end(*said))
        raise ValueError(f"a child asked {question!r}")

    def _published(self, name: str, configuration: Any) -> Any:
        """The definition that a child means, with the settings it gave it."""
        definition = self._definition.mesh.definitions.get(name)
        if definition is None or configuration is None:
            return name
        changed = definition.configure()
        changed.configuration = configuration
        return changed


def reference(
    definition: TaskDefinition[Any, Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> HandlerRef:
    """Tell a child where the handler is; what it cannot import goes by value, with its arguments.

    Raises `TypeError` if neither is possible.
    """
    fn = definition.fn
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    main = _main_of(module)
    if str(main.get("init_main_from_name")).endswith(".__main__"):  # `python -m package`: it is a module like others
        module, main = main["init_main_from_name"], {}
    if module and qualname and _is_found(fn, qualname) and (module != "__main__" or main):
        file = getattr(sys.modules[fn.__module__], "__file__", None)
        return HandlerRef(module, qualname, file, main, None)
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: PLC0415 — an extra
    except ImportError:
        raise TypeError(
            f"task {definition.name!r}: a child process cannot import {qualname or fn!r} of {module!r}: define the handler "
            "at the top of a module, or install taskmesh[process], which can send functions by value"
        ) from None
    try:
        return HandlerRef(module or "", qualname or "", None, {}, cloudpickle.dumps((fn, args, kwargs or {})))
    except Exception as error:
        raise TypeError(
            f"task {definition.name!r}: a child process cannot import {qualname or fn!r} of {module!r}, and it cannot be "
            f"sent by value ({error}): define the handler at the top of a module"
        ) from error


def _is_found(fn: Any, qualname: str) -> bool:
    found: Any = sys.modules.get(fn.__module__)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return (found.fn if isinstance(found, TaskDefinition) else found) is fn


def _main_of(module: str | None) -> dict[str, Any]:
    """What `multiprocessing` tells its own children about a script, if the handler is in it."""
    if module != "__main__":
        return {}
    told: dict[str, Any] = dict(spawn.get_preparation_data("taskmesh"))
    main: dict[str, Any] = {name: told[name] for name in ("init_main_from_name", "init_main_from_path") if name in told}
    if main:
        main["sys_argv"] = told["sys_argv"]
    return main


def _brought_over(kind: str | None, reason: str, delay_ms: int | None, pickled: bytes | None) -> BaseException:
    """Make the child's error an error here, with its reason as the cause."""
    error: BaseException | None = None
    with suppress(Exception):
        error = pickle.loads(pickled) if pickled is not None else None  # noqa: S301 — our own child wrote it
    if not isinstance(error, BaseException):
        error = HandlerError(reason)
    if kind == "Retry" and not (isinstance(error, Retry) and error.delay_ms == delay_ms):
        error = Retry(reason, delay_ms=delay_ms or 0)
    if kind == "Snooze" and not (isinstance(error, Snooze) and error.delay_ms == delay_ms):
        error = Snooze(reason, delay_ms=delay_ms or 0)
    if kind == "TaskFailed" and not isinstance(error, TaskFailed):
        error = TaskFailed(reason)
    if kind == "LeaseLost" and not isinstance(error, LeaseLost):
        error = LeaseLost(reason)
    error.__cause__ = ReasonElsewhere(reason)
    return error


def _raising(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the system does this when memory is short)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
