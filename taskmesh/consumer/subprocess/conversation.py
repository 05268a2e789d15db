"""The parent's half of one call in a child process: say what to run, answer questions, and return the outcome.

A thread leads each conversation, as one runs each plain function. If the child dies before it has begun (it was idle, and
something else killed it) another one is asked; if it dies later, the execution fails. Whatever a child says, this process only
reads it as data.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from taskmesh.client.definition import TaskDefinition
from taskmesh.client.params import checked_size
from taskmesh.client.publisher import Publishable
from taskmesh.client.returns import PLAIN
from taskmesh.consumer.durable.transactions import Transactions
from taskmesh.consumer.logs import how_it_is_set_up
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.outcome import reason_of
from taskmesh.consumer.subprocess.child import Call
from taskmesh.consumer.subprocess.handler_reference import reference
from taskmesh.consumer.subprocess.processes import MAX_ENDING_S, Child, Processes
from taskmesh.consumer.subprocess.wire import PutAside, configuration_of, error_of
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After
from taskmesh.model.errors import LeaseLost, ProcessDied, TaskMeshError, TaskSuspended
from taskmesh.store.blocking import run_now
from taskmesh.store.finish import Outcome

_STARTS_TRIED = 3
_OUTCOMES = ("returned", "raised")
_OF_THE_JOURNAL = frozenset(
    ["begin_step", "end_step", "sleep", "wait_for", "start", "results", "step_begins", "step_outcome", "step_ends"]
)


class Conversation:
    """One call in a child process, led by a thread of the parent."""

    def __init__(
        self,
        children: Processes,
        transactions: Transactions,
        execution: Execution,
        definition: TaskDefinition[Any, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._children = children
        self._transactions = transactions
        self._execution = execution
        self._definition = definition
        self._arguments = (args, kwargs)
        self._lock = threading.Lock()
        self._asked: Future[Child] | None = None
        self._child: Child | None = None
        self._killed = threading.Event()
        self._begun = False
        self._step_outcome: Outcome | None = None
        """What a transactional step of the child is about to record."""

    async def outcome(self) -> Any:
        """Run the handler in a child process. Return or raise what it does. Cancellation kills the child.

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
            # No limit of its own is needed: each execution holds a slot of the consumer.
            outcome = await anyio.to_thread.run_sync(converse, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        except asyncio.CancelledError:
            self._kill()
            with anyio.CancelScope(shield=True), anyio.move_on_after(MAX_ENDING_S):
                await done.wait()  # so that it is really gone when its slot is free
            raise
        return outcome()

    def _kill(self) -> None:
        """Kill the child, or make sure that there will be none."""
        with self._lock:
            self._killed.set()
            if self._child is not None:
                self._child.kill()
            elif self._asked is not None:
                self._asked.cancel()

    def _converse(self) -> Callable[[], Any]:
        """Lead the conversation to its end. Return a function that returns or raises the outcome."""
        call = self._call()
        for _ in range(_STARTS_TRIED):
            child = self._free_child()
            if child is None:
                return _raising(ProcessDied("the execution was stopped before there was a process for its handler"))
            try:
                self._execution.conversation = self
                self.lease_changed()
                child.connection.send(call)
                outcome = self._listen(child)
            except (EOFError, OSError):
                death = self._after_death(child)
                if death is None:
                    continue
                return death
            except Exception as error:  # noqa: BLE001 — a handler can make its process say anything
                child.kill()
                self._reaped(child)
                text = f"the handler's process was killed, since it sent an invalid message: {reason_of(error).text}"
                return _raising(ProcessDied(text))
            finally:
                self._execution.conversation = None
            self._release(child)
            return outcome
        return _raising(ProcessDied("the handler's process could not be started: idle ones died one after the other"))

    def _free_child(self) -> Child | None:
        """Wait for a child. None if the execution was stopped meanwhile. Raises `ProcessDied` if none can be started."""
        with self._lock:
            if self._killed.is_set():
                return None
            asked = self._asked = self._children.ask()
        try:
            child = asked.result()
        except CancelledError:
            return None
        except Exception as error:
            raise ProcessDied(f"the handler's process could not be started: {type(error).__name__}: {error}") from error
        with self._lock:
            if not self._killed.is_set():
                self._child = child
                return child
        self._children.give_back(child)
        return None

    def lease_changed(self) -> None:
        """Tell the child the new end of its lease. Callable from any thread, again and again."""
        with self._lock:
            if self._child is not None:
                self._child.lease_until(self._execution.lease_until)

    def _after_death(self, child: Child) -> Callable[[], Any] | None:
        """Clean up after a dead child. Return a function that raises the execution's error. None: the call had not begun."""
        ended_itself = child.saw_its_lease_end
        code = self._reaped(child)
        if ended_itself:
            return _raising(self._lease_lost())
        if not self._begun:
            if child.was_free and not self._killed.is_set():
                return None  # it died of something else before
            return _raising(ProcessDied(f"the handler's process could not be started: {_how_it_ended(code)}"))
        if self._execution.session_id is not None:
            self._transactions.abandoned(self._execution)
        return _raising(ProcessDied(f"the handler's process {_how_it_ended(code)}"))

    def _lease_lost(self) -> LeaseLost:
        execution = self._execution
        return LeaseLost(
            f"task {execution.name!r} {execution.key!r}: the handler's process saw its lease end without a renewal: this "
            "process was suspended, or its machine overloaded"
        )

    def _reaped(self, child: Child) -> int:
        with self._lock:
            self._child = None
        return self._children.reap(child)

    def _release(self, child: Child) -> None:
        with self._lock:
            self._child = None
            killed = self._killed.is_set()
        if killed:  # cancelled at the very moment of its end: it is dead or dying
            self._children.reap(child)
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
            failures=execution.failures,
            option=execution.option,
            extra=execution.extra,
            trace=execution.span.carrier if execution.span is not None else None,
            log=how_it_is_set_up(),
        )

    def _listen(self, child: Child) -> Callable[[], Any]:
        """Answer what the child asks, until it sends the outcome."""
        while True:
            kind, *said = child.receive()
            if child.saw_its_lease_end:  # and so may have told its handler, which ends a transaction() early now
                self._execution.tell_lease_is_over()
            if kind in _OUTCOMES:
                if child.saw_its_lease_end:
                    return _raising(self._lease_lost())
                return self._outcome(kind, *said)
            if kind == "begins":
                self._begun = True
                self._execution.begins_in_child()
                continue
            if kind == "log":
                self._execution.log(*said)
                continue
            answer: Any = None
            refusal: Exception | None = None
            try:
                answer = self._answer(kind, said)
            except TaskSuspended as error:
                refusal = PutAside(error.kind, error.name)
            except Exception as error:  # noqa: BLE001 — it is raised where it was asked for, in the child
                refusal = error
            _reply(child, answer, refusal)

    def _answer(self, question: str, said: list[Any]) -> Any:
        execution = self._execution
        if question == "cancelled":
            return execution.cancelled
        if question == "dependencies":
            return execution.dependencies_for_a_child()
        if question == "deadline":
            return execution.deadline
        if question == "progress":
            return execution.set_progress(*said)
        if question == "after":
            return execution.after_in_thread(*said)
        if question == "publish":
            definition, configuration, key, params = said
            return execution.publish_in_thread(self._published(definition, configuration), key, params)
        if question == "address":
            return pickle.dumps(self._transactions.address())
        if question in _OF_THE_JOURNAL:
            return self._answer_of_journal(question, said)
        side = self._transactions.side(execution)
        if question == "begin":
            return run_now(side.begin(*said))
        if question == "record":
            execution.set_result(*said)
            return run_now(side.record())
        if question == "end":
            return run_now(side.end(*said))
        raise ValueError(f"a child asked {question!r}")

    def _answer_of_journal(self, question: str, said: list[Any]) -> Any:
        """Answer a question about the execution's journal."""
        ledger = self._execution.ledger
        if question == "start":
            name, configuration, pairs, detached = said
            started = ledger.start(self._published(name, configuration), dict(pairs), detached=detached)
            return [handle.created for handle in started]
        if question == "results":
            pairs, return_errors = said
            return ledger.results([_Started(*pair) for pair in pairs], return_errors=return_errors)
        if question.startswith("step_"):
            return self._answer_of_step(question, *said)
        return getattr(ledger, question)(*said)

    def _answer_of_step(self, question: str, id_: str, said: Any) -> Any:
        """Answer a question of a transactional step of the child."""
        execution = self._execution
        side = self._transactions.step_side(execution, execution.journal, execution.journal.begun(id_))
        if question == "step_begins":
            return run_now(side.begin(said))
        if question == "step_outcome":
            worker_id, self._step_outcome = run_now(side.outcome(said))
            return worker_id, self._step_outcome
        if question == "step_ends":
            return run_now(side.end(self._step_outcome if said else None))
        raise ValueError(f"a child asked {question!r}")

    def _outcome(self, kind: str, said: Any) -> Callable[[], Any]:
        if kind == "returned":
            return lambda: self._definition.returns.read(said)
        return _raising(error_of(said))

    def _published(self, name: str, configuration: Mapping[str, Any] | None) -> Any:
        """Return the definition that a child means, with the settings that it has given it."""
        if configuration is None:
            return name
        settings = configuration_of(configuration)
        definition = self._definition.publisher.definitions.get(name)
        return _Meant(name, settings, definition)


@dataclass(frozen=True)
class _Started:
    """A child task that the handler has started, identified by the process in which it runs, which reads its value."""

    name: str
    key: str

    def read(self, stored: Any) -> Any:
        return stored


@dataclass
class _Meant:
    """The definition that a child means, in the child's configuration."""

    name: str
    configuration: Configuration
    definition: Publishable | None
    """What this process knows of it. None: it is defined only in the child, which has checked the params."""
    returns = PLAIN
    encrypted = False
    """The publisher here has its codec, or that of the mesh."""

    @property
    def broadcast(self) -> bool:
        """Whether each worker that is live runs it."""
        return self.definition is not None and self.definition.broadcast

    def to_store(self, params: Mapping[str, Any], after: After | None = None) -> tuple[dict[str, Any], int]:
        if self.definition is not None:
            return self.definition.to_store(params, after)
        stored = dict(params)
        return stored, checked_size(self.name, stored)


def _reply(child: Child, answer: Any, refusal: Exception | None) -> None:
    try:
        child.connection.send((answer, refusal))
    except OSError:
        raise
    except Exception:  # noqa: BLE001 — not every error can be pickled
        child.connection.send((None, TaskMeshError(reason_of(refusal).text if refusal is not None else "no answer")))


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
