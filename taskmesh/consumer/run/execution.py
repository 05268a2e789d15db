"""One execution: one worker's attempt at one task, from its claim to its outcome."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

from taskmesh.client.publisher import Publishable, Publisher
from taskmesh.client.returns import PLAIN, Returns
from taskmesh.consumer.run.dependency_results import DependencyResults
from taskmesh.consumer.run.recording import Ledger, Recorder
from taskmesh.consumer.run.report import Report, checked_progress, line_of
from taskmesh.consumer.run.run_time import UNLIMITED, RunTime
from taskmesh.consumer.run.stop_reasons import FROM_OUTSIDE, Stop
from taskmesh.consumer.run.tracing import ProcessSpan
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After
from taskmesh.model.error_policy import NO_POLICY, ErrorPolicy
from taskmesh.model.errors import LeaseLost, TaskMeshError, TaskSuspended
from taskmesh.model.loop import Loop
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Task
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.payloads import is_boxed
from taskmesh.store.publication import Publication

T = TypeVar("T")
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.1, 1.0
_LATEST_PING_SHARE = 0.6
_lock = threading.Lock()
"""Protects what threads share with the loop (logs, publications, the decision to stop). It is held briefly, so one is enough."""


# The parts of a worker that an execution calls, each by the name of its class, which imports this file.


class Executor(Protocol):
    """What runs the handler (`consumer/executor.py`)."""

    @property
    def state(self) -> Any:
        """What `@mesh.lifespan` has yielded in this process."""

    def unwind(self, execution: Execution) -> None:
        """Make sure that the handler of a suspended execution ends."""

    def obey(self, execution: Execution) -> None:
        """Cancel the handler of an execution that was told to stop."""

    def obey_soon(self, execution: Execution) -> None:
        """Cancel it soon. Callable from any thread."""

    def begins_soon(self, execution: Execution) -> None:
        """Start counting its run time: a child process is about to run the handler. Callable from any thread."""


class Reporter(Protocol):
    """What writes progress and logs (`reporter.py`)."""

    def add(self, execution: Execution) -> None:
        """Write what this execution has to report soon. Callable from any thread."""


class Transactions(Protocol):
    """What opens blocks that commit together with the SUCCESS (`consumer/durable/transactions.py`)."""

    # ruff: noqa: D102 — documented at `TaskContext` and `BlockingTaskContext`

    def in_loop(self, execution: Execution) -> AbstractAsyncContextManager[Any]: ...
    def in_thread(self, execution: Execution) -> AbstractContextManager[Any]: ...
    def again_in_loop(self, execution: Execution, fn: Callable[[Any], Any]) -> Awaitable[Any]: ...
    def again_in_thread(self, execution: Execution, fn: Callable[[Any], Any]) -> Any: ...


class Journals(Protocol):
    """What keeps the records of executions (`consumer/durable/journal.py`)."""

    # ruff: noqa: D102 — documented there

    def open(self, execution: Execution) -> Recorder: ...
    def in_thread(self, execution: Execution) -> Ledger: ...
    def done_in_loop(self, doing_it: Coroutine[Any, Any, T]) -> T: ...


class Conversation(Protocol):
    """The conversation with the child process that runs the handler (`consumer/subprocess/conversation.py`)."""

    def lease_changed(self) -> None:
        """Tell it the new end of the lease. Callable from any thread."""


class Execution:
    """The state of one execution.

    It belongs to the event loop, with two exceptions: the lease, which the pinger's thread renews, and the decision whether it
    was told to stop before it ended, which is made under a lock.

    Thousands are created per second, and most of them log nothing, publish nothing and are never stopped. So what such an
    execution does not need is an attribute of the class.
    """

    conversation: Conversation | None = None
    """That with the child process in which it runs at the moment."""
    left = False
    """Whether its handler has really ended, after the execution was stopped from outside."""
    secrets: tuple[str, ...] = ()
    """Texts that must not appear in logs and reasons: those in params that must not be shown."""
    loop: Loop | None = None
    """How its task repeats, if it is a loop. A loop holds no slot, and the end of an execution is not the end of its task."""
    recorded = False
    """Whether `transaction()` has already recorded SUCCESS."""
    writes_held_back = False
    """Whether nothing may be written to its task, since an open `transaction()` will write to it."""
    batched = False
    """Whether it is one of several that share a call of the handler."""
    suspended_for: Document | None = None
    """What it waits for, once it is suspended. From then on this is its outcome, whatever its handler does."""
    session_id: Any = None
    """The session of its transaction, if it has begun one."""
    span: ProcessSpan | None = None
    """Its trace span, if tracing is on."""
    returns: Returns = PLAIN
    """What its handler returns, once the handler is known."""
    errors: ErrorPolicy = NO_POLICY
    """Which errors are retried, once the handler is known."""
    published_before = 0
    """How many of its publications were made before its `transaction()`."""
    publications: list[Publication] | tuple[()] = ()
    run_time = UNLIMITED
    """How long it may still take."""
    task: asyncio.Task[Any] | None = None
    """The asyncio task that runs the handler after its first step, until the handler has really ended."""
    concluding: asyncio.Task[Any] | None = None
    """The asyncio task that brings it to its outcome, if that takes time after it is judged."""
    silent_until = 0.0
    """Until when it must not be pinged."""
    stop_reason: Stop | None = None
    """Why it was told to stop, if it was. See `tell_to_stop`."""
    handler_running = False
    hook_running = False
    """Whether the hook `after` is running. Only the end of the worker stops that."""
    judged = False
    """Whether it is decided how it ended. What its handler does from then on does not count."""
    ended = False
    """Whether its outcome is decided, so that it can no longer be stopped: it is judged, or its transaction commits."""
    handler_done: asyncio.Event | None = None
    """Set when the handler has really ended, if that may be later: a thread, or a handler that ignores its cancellation."""
    result: Any = None
    as_task: Any = None
    """The `Task` that is passed to hooks."""
    recorded_or_lost = False
    """Whether its outcome is recorded, or lost with the lease. Then its lease no longer matters."""
    _option: TaskOption | None = None
    _stored_params: Document | None = None
    """The params as stored in the document, if they had to be decrypted."""
    _journal: Recorder | None = None
    _report: Report | None = None
    """Its unwritten logs and progress, if there are any."""

    def __init__(
        self,
        document: Document,
        running_id: str,
        worker_id: str,
        claim_sent: float,
        clock: ServerClock,
        *,
        executor: Executor,
        reporter: Reporter,
        publisher: Publisher,
        transactions: Transactions,
        journals: Journals,
        dependency_results: DependencyResults,
    ) -> None:
        self.id: str = document["_id"]
        self.name: str = document["name"]
        self.key: str = document["key"]
        self.queue: str = document["queue"]
        self.worker_id = worker_id
        self.running_id = running_id
        self.document = document
        self.stored_option: Document = document["task_option"]
        self.started = time.monotonic()
        self._clock = clock
        self._executor = executor
        self._reporter = reporter
        self.publisher = publisher
        self._transactions = transactions
        self._journals = journals
        self._dependency_results = dependency_results
        self.renewed(claim_sent)
        if (limit_ms := self.stored_option.get("run_timeout_ms")) is not None:
            self.run_time = RunTime(limit_ms)

    # --- its params ---

    @property
    def has_boxed_params(self) -> bool:
        """Whether its params have to be decrypted, or fetched from elsewhere."""
        params = self.document.get("params")
        return isinstance(params, dict) and any(map(is_boxed, params.values()))

    async def open_params(self) -> None:
        """Fetch params that are stored separately, and decrypt. Raises `CannotDecrypt`, `PayloadMissing`."""
        if self.has_boxed_params:
            self.document = await self.publisher.fetched(self.document)
            self._stored_params = params = self.document["params"]
            payloads = self.publisher.payloads
            self.document["params"] = payloads.unsealed_params(self.id, params)
            # The longest first: one may begin with another.
            self.secrets = tuple(sorted(payloads.secrets_in(self.id, params), key=len, reverse=True))

    def shown(self) -> Task:
        """Return the task for hooks, with secrets hidden."""
        payloads = self.publisher.payloads
        if self._stored_params is None:
            return payloads.task(self.document)
        params = self.document["params"] | payloads.shown_params(self.id, self._stored_params)
        return payloads.task(self.document | {"params": params})

    # --- the lease ---

    def renewed(self, sent: float) -> None:
        """Note a renewal that was sent at this monotonic time. The lease is trusted from then on, less a margin."""
        self.leased(sent, self.stored_option["worker_timeout_ms"] / 1000)
        self._ping_due = sent + self.ping_every_s

    @property
    def next_ping(self) -> float:
        """When to renew the lease next (monotonic)."""
        return max(self._ping_due, self.silent_until)

    @next_ping.setter
    def next_ping(self, moment: float) -> None:
        self._ping_due = moment

    @property
    def ping_every_s(self) -> float:
        """How often to renew the lease: as the option says, but well before the lease ends."""
        option = self.stored_option
        return float(min(option["ping_interval_ms"], option["worker_timeout_ms"] * _LATEST_PING_SHARE) / 1000)

    def leased(self, sent: float, seconds: float) -> None:
        """Trust the lease for so many seconds from when it was requested, less a margin."""
        self.lease_until = sent + seconds - min(seconds * _MARGIN_SHARE, _LARGEST_MARGIN_S)
        if (conversation := self.conversation) is not None:  # read once: other threads set it
            conversation.lease_changed()

    def ping_again(self, now: float) -> None:
        """Plan the next try after a failed ping."""
        self.next_ping = now + min(self.stored_option["ping_interval_ms"] / 4000, 1.0)

    # --- what a handler may call (see context.Running) ---

    @property
    def pipeline(self) -> asyncio.Task[Any] | None:
        """The asyncio task that still has to hand over its outcome, if any."""
        return self.concluding if self.judged else self.task

    @property
    def option(self) -> TaskOption:
        """The task's option as of the claim."""
        if self._option is None:
            self._option = TaskOption(**self.stored_option)
        return self._option

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields of its task that are not taskmesh's own, as of the claim."""
        return {name: value for name, value in self.document.items() if name not in Task.OWN_FIELDS}

    @property
    def attempt(self) -> int:
        """Which execution of the task this is, counted from 1."""
        return int(self.failures + self.document["task_state"].get("lost_cnt", 0) + 1)

    @property
    def failures(self) -> int:
        """How many executions of the task had failed before this one claimed it."""
        state = self.document["task_state"]
        fails = sum(entry["state"] == "FAIL" for entry in state["worker_states"])
        return int(fails + state.get("dropped_fail_cnt", 0))

    @property
    def deadline(self) -> datetime | None:
        """When its `run_timeout_ms` is over, by the server's clock."""
        left = self.run_time.left_s
        return None if left is None else self._clock.now() + timedelta(seconds=left)

    async def dependencies(self) -> dict[tuple[str, str], Any]:
        """See `TaskContext.dependencies`."""
        return await self._dependency_results.of(self.id)

    def blocking_dependencies(self) -> dict[tuple[str, str], Any]:
        """See `BlockingTaskContext.dependencies`."""
        return self._dependency_results.in_thread(self.id)

    def dependencies_for_a_child(self) -> dict[tuple[str, str], Any]:
        """Return the results in plain values: a child process may not know the types."""
        return self._dependency_results.in_thread(self.id, plain=True)

    @property
    def state(self) -> Any:
        """What `@mesh.lifespan` has yielded in this process."""
        return self._executor.state

    @property
    def leaving(self) -> bool:
        """Whether it was stopped from outside and its handler may still be at work. Then it keeps its place under limits."""
        return self.stop_reason in FROM_OUTSIDE and not self.left

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop. True is final: the handler has been told, and the execution is judged accordingly."""
        return self.suspended_for is not None or self.is_told_to_stop()

    def is_told_to_stop(self) -> bool:
        """Return whether it was told to stop. If its lease is over, decide that now, before the handler learns of it."""
        if self.stop_reason is None and time.monotonic() >= self.lease_until:
            self.tell_lease_is_over()
        return self.stop_reason is not None

    def tell_lease_is_over(self) -> None:
        """Decide that its lease is over. Callable from any thread."""
        if self.tell_to_stop(Stop.LEASE_LOST):
            self._executor.obey_soon(self)

    def stop(self, reason: Stop) -> None:
        """Make it stop: its handler is cancelled. The first reason counts. Call it in the event loop."""
        if self.tell_to_stop(reason):
            self._executor.obey(self)

    def begins_in_child(self) -> None:
        """Note that a child process is about to run the handler. Callable from any thread."""
        self._executor.begins_soon(self)

    def cut_hook_short(self) -> None:
        """Stop waiting for the hook `after`: the worker ends, and the outcome has to be recorded."""
        if self.hook_running and self.concluding is not None:
            self.concluding.cancel()

    def tell_to_stop(self, reason: Stop) -> bool:
        """Decide that the handler has to stop. Callable from any thread.

        False if its outcome is decided, or it was told before.
        """
        with _lock:
            if self.ended or self.stop_reason is not None:
                return False
            self.stop_reason = reason
            return True

    # --- its journal ---

    @property
    def journal(self) -> Recorder:
        """What it has recorded. For the event loop."""
        self._check_alone("steps, sleeps, waits and children")
        if self._journal is None:
            self._journal = self._journals.open(self)
        return self._journal

    @property
    def ledger(self) -> Ledger:
        """The journal as a blocking handler in a thread uses it."""
        self._check_alone("steps, sleeps, waits and children")
        return self._journals.in_thread(self)

    @property
    def records(self) -> bool:
        """Whether its handler has used a step, a sleep or the like."""
        return self._journal is not None

    def _check_alone(self, what: str) -> None:
        if self.batched:
            raise TaskMeshError(
                f"task {self.name!r} {self.key!r}: {what} are not for the handler of a batch, whose tasks share one call: "
                "publish a task without batch for that"
            )

    def suspend(self, wait: Document) -> None:
        """Suspend the task until this has happened: that is how this execution ends. Call it in the event loop."""
        with _lock:
            self.suspended_for = wait
        self.run_time.stand_still()
        self._executor.unwind(self)

    def check_goes_on(self) -> None:
        """Raise `TaskSuspended` if it is suspended, or `LeaseLost` if what it writes no longer counts."""
        if self.suspended_for is not None:
            raise TaskSuspended(self.suspended_for["kind"], self.suspended_for["name"])
        self.check_lease()

    def set_progress(self, fraction: float, message: str | None) -> None:
        """Keep the newest progress. It is written soon."""
        self.check_goes_on()
        share, text = checked_progress(fraction, message)
        self._begun_report().set_progress(share, None if text is None else self._kept_text(text), self._clock.now())
        self._report_soon()

    def log(self, message: str) -> None:
        """Keep a line of the log. It is written soon."""
        self._begun_report().add_line(self._kept_text(line_of(message)), self._clock.now())
        self._report_soon()

    def _begun_report(self) -> Report:
        with _lock:
            if self._report is None:
                self._report = Report()
            return self._report

    def redacted(self, text: str) -> str:
        """Return the text with secrets replaced by stars."""
        for secret in self.secrets:
            text = text.replace(secret, "**********")
        return text

    def _kept_text(self, text: str) -> str:
        return self.publisher.payloads.sealed_text(self.id, self.redacted(text))

    async def publish(self, definition: Publishable | str, key: str, params: Mapping[str, Any]) -> None:
        """Keep a task to be published together with this execution's SUCCESS. Raises what publishing it would raise."""
        self.check_goes_on()
        definition = await self.publisher.resolved(definition)
        after = definition.configuration.given_after
        if after is None:
            after = await self.publisher.after_of(definition.name, key)
        publication = self.publisher.publication_of(definition, key, params, after)
        if publication.configuration.after:
            await self._check_after(publication)
        self._add_publication(publication)

    def publish_in_thread(self, definition: Publishable | str, key: str, params: Mapping[str, Any]) -> None:
        """Keep a task to be published together with this execution's SUCCESS. For threads other than the event loop's."""
        if isinstance(definition, str) or definition.broadcast or _asks_first(definition.configuration):
            return self._journals.done_in_loop(self.publish(definition, key, params))
        self.check_goes_on()
        return self._add_publication(self.publisher.publication_of(definition, key, params))

    def after_in_thread(self, name: str, key: str) -> After | None:
        """Return what an existing task waits for, or has waited for. For child processes, which have no connection."""
        return self._journals.done_in_loop(self.publisher.after_of(name, key))

    async def _check_after(self, publication: Publication) -> None:
        """Raise `TaskNotFound` unless every dependency exists, or is published before it by this handler."""
        # What the handler has published in its `transaction()` is visible only there, when it ends.
        if not self.writes_held_back:
            await self.publisher.check_after(publication, [each.id for each in self.publications])

    def _add_publication(self, publication: Publication) -> None:
        if self.span is not None:
            publication.trace = self.span.carrier
        with _lock:
            if self.ended:
                raise LeaseLost(
                    f"task {self.name!r} {self.key!r}: this execution has ended, so it publishes nothing any more: publish "
                    f"before the handler returns, and before the end of its transaction()"
                )
            if isinstance(self.publications, tuple):
                self.publications = [publication]
            else:
                self.publications.append(publication)

    @property
    def in_a_block(self) -> bool:
        """Whether a `transaction()` is open, whose result can be set."""
        return self.writes_held_back and not self.recorded

    def set_result(self, value: Any) -> None:
        """Keep the result until a `transaction()` ends."""
        self.result = value

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a block that commits together with the SUCCESS."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._transactions.in_loop(self)

    def blocking_transaction(self) -> AbstractContextManager[Any]:
        """Open such a block from a thread."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._transactions.in_thread(self)

    def in_transaction(self, fn: Callable[[Any], Awaitable[Any]]) -> Awaitable[Any]:
        """Call `fn` in such a block, and again after each conflict."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._transactions.again_in_loop(self, fn)

    def blocking_in_transaction(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn` in such a block from a thread, and again after each conflict."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._transactions.again_in_thread(self, fn)

    @property
    def conflicts(self) -> int:
        """How many executions in a row have ended because their `transaction()` met a conflict."""
        return int(self.document["task_state"].get("conflict_cnt") or 0)

    def check_lease(self) -> None:
        """Raise `LeaseLost` if what this execution writes no longer counts."""
        if self.stop_reason is not None and (self.stop_reason is Stop.LEASE_LOST or self.stop_reason in FROM_OUTSIDE):
            raise LeaseLost(
                f"task {self.name!r} {self.key!r}: {self.stop_reason.value}, so this execution writes nothing any more"
            )

    def judge(self) -> Stop | None:
        """Decide that its handler's end counts, so that nothing can stop it any more.

        Return why it was told to stop before, if it was.
        """
        with _lock:
            self.judged = self.ended = True
            return self.stop_reason

    def commit(self) -> Stop | None:
        """Decide that it succeeds, unless it was told to stop before: then return why. Later publications are refused."""
        with _lock:
            self.ended = self.ended or self.stop_reason is None
            return self.stop_reason

    def commit_failed(self) -> None:
        """Note that its `transaction()` failed: it goes on as before."""
        with _lock:
            self.ended = self.judged

    def _report_soon(self) -> None:
        if not self.writes_held_back:
            self._reporter.add(self)

    def write_again(self) -> None:
        """Ping at once after a failed `transaction()`, and report what was held back."""
        self.writes_held_back = False
        self.silent_until = 0.0
        self.next_ping = time.monotonic()
        self._report_soon()

    # --- the outcome ---

    def outcome(self, kind: Any, entry: Mapping[str, Any], size: int = 0, delay_ms: int | None = None) -> Outcome:
        """Return how this execution ended, with its logs and progress: the last report of them may have failed."""
        logs, progress, unannounced = {}, None, False
        if (report := self._report) is not None:
            logs, progress, unannounced = report.logs(), report.progress, report.progress_unannounced
            size += report.size
        if self.secrets and "fail_reason" in entry:
            entry = {**entry, "fail_reason": self.redacted(entry["fail_reason"])}
        entry = self.publisher.payloads.sealed_entry(self.id, entry)
        entry = {**entry, **logs} if logs else entry
        return Outcome(
            self.id,
            self.running_id,
            kind,
            entry,
            delay_ms,
            progress,
            unannounced,
            size,
            concerns_others=bool({"pending", "line", "has_children"} & self.document["task_state"].keys()),
        )

    def report(self) -> Outcome | None:
        """Return the new logs and progress, to be written while the execution goes on."""
        logs, progress = self._report.unwritten() if self._report is not None else ({}, None)
        return Outcome(self.id, self.running_id, "reported", logs, None, progress) if logs or progress else None

    def report_failed(self, report: Outcome) -> None:
        """Report again later what could not be written."""
        self._begun_report().not_written(dict(report.entry), report.progress)
        self._report_soon()


def _asks_first(configuration: Configuration) -> bool:
    """Whether a publication can be checked only by asking the database."""
    return bool(configuration.after) or configuration.given_after is None
