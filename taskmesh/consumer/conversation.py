"""The parent's half of one call in a child process: say what to run, answer what it asks, bring its outcome over.

A thread leads each conversation, as one runs each plain function. If the child dies before it has begun (it was idle, and
something else killed it) another one is asked; if it dies later, that is the execution's failure.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
import bson

from taskmesh import logs
from taskmesh.consumer.child import Call
from taskmesh.consumer.execution import Execution
from taskmesh.consumer.handler_reference import reference
from taskmesh.consumer.processes import MAX_ENDING_S, Child, Processes
from taskmesh.consumer.reasons import Reason, ReasonElsewhere
from taskmesh.consumer.transactions import Transactions
from taskmesh.definition import TaskDefinition
from taskmesh.errors import LeaseLost, Retry, Snooze, TaskFailed
from taskmesh.store.blocking import run_now
from taskmesh.store.driver import CODEC

_STARTS_TRIED = 3


class ProcessDied(Exception):
    """The process of a handler ended before the handler did. The text names its exit code or signal."""


class HandlerError(Exception):
    """Stands for an error that was raised in a child process and could not be brought over."""


class Conversation:
    """One call in a child. A thread of the parent leads it."""

    def __init__(
        self,
        children: Processes,
        execution: Execution,
        definition: TaskDefinition[Any, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._children = children
        self._execution = execution
        self._definition = definition
        self._arguments = (args, kwargs)
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._killed = False

    async def outcome(self) -> Any:
        """Run the handler in a child, and return or raise what it does. Cancellation kills the child.

        Raises `ProcessDied` if the child ends before its handler.
        """
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def converse() -> Callable[[], Any]:
            try:
                return self._converse()
            finally:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(done.set)

        try:
            # A limiter of its own, so without a limit: an execution holds a slot of the consumer, and that is the limit.
            outcome = await anyio.to_thread.run_sync(converse, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except asyncio.CancelledError:
            self._kill()
            with anyio.CancelScope(shield=True), anyio.move_on_after(MAX_ENDING_S):
                await done.wait()  # so that it is really gone when its slot is free
            raise
        return outcome()

    def _kill(self) -> None:
        """Kill the child, or see to it that there will be none."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def _converse(self) -> Callable[[], Any]:
        """Lead the conversation to its end, and return what returns or raises the outcome."""
        call = self._call()
        for _ in range(_STARTS_TRIED):
            child = self._children.take()
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
        return self._children.bury(child)

    def _release(self, child: Child) -> None:
        with self._lock:
            self._child = None
            killed = self._killed
        if killed:  # cancelled in the very moment of its end: it is dead or dying
            self._children.bury(child)
        else:
            self._children.give_back(child)

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
            trace=execution.span.carrier if execution.span is not None else None,
            log=logs.how_it_is_set_up(),
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


def _brought_over(kind: str | None, reason: Reason, delay_ms: int | None, pickled: bytes | None) -> BaseException:
    """Make the child's error an error here, with its reason as the cause."""
    error: BaseException | None = None
    with suppress(Exception):
        error = pickle.loads(pickled) if pickled is not None else None  # noqa: S301 — our own child wrote it
    if not isinstance(error, BaseException):
        error = HandlerError(reason.text)
    if kind == "Retry" and not (isinstance(error, Retry) and error.delay_ms == delay_ms):
        error = Retry(reason.text, delay_ms=delay_ms or 0)
    if kind == "Snooze" and not (isinstance(error, Snooze) and error.delay_ms == delay_ms):
        error = Snooze(reason.text, delay_ms=delay_ms or 0)
    if kind == "TaskFailed" and not isinstance(error, TaskFailed):
        error = TaskFailed(reason.text)
    if kind == "LeaseLost" and not isinstance(error, LeaseLost):
        error = LeaseLost(reason.text)
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
