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
from taskmesh.consumer.recording import Ledger, Recorder
from taskmesh.consumer.report import Report, checked_progress, line_of
from taskmesh.consumer.run_time import UNLIMITED, RunTime
from taskmesh.consumer.stop_reasons import FROM_OUTSIDE, Stop
from taskmesh.consumer.tracing import ProcessSpan
from taskmesh.model.configuration import Configuration
from taskmesh.model.dependency import After
from taskmesh.model.error_policy import NO_POLICY, ErrorPolicy
from taskmesh.model.errors import LeaseLost, TaskMeshError, TaskSuspended
from taskmesh.model.loop import Loop
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Task
from taskmesh.store.clock import ServerClock
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome
from taskmesh.store.payloads import is_boxed
from taskmesh.store.publication import Publication

T = TypeVar("T")
_MARGIN_SHARE, _LARGEST_MARGIN_S = 0.1, 1.0
_LATEST_PING_SHARE = 0.6
_lock = threading.Lock()
"""Handlers in threads log, publish and ask whether to stop; one lock for all is enough, since it is held for a moment."""


class Reports(Protocol):
    """Who writes progress and logs: the reporter."""

    def add(self, execution: Execution) -> None:
        """Write what this execution has to tell soon; from any thread."""


class Blocks(Protocol):
    """Who opens blocks that commit with the SUCCESS: the transactions."""

    # ruff: noqa: D102 — what each does stands at `TaskContext` and `BlockingTaskContext`

    def in_loop(self, execution: Execution) -> AbstractAsyncContextManager[Any]: ...
    def in_thread(self, execution: Execution) -> AbstractContextManager[Any]: ...
    def again_in_loop(self, execution: Execution, fn: Callable[[Any], Any]) -> Awaitable[Any]: ...
    def again_in_thread(self, execution: Execution, fn: Callable[[Any], Any]) -> Any: ...


class Journals(Protocol):
    """Who keeps what executions record."""

    # ruff: noqa: D102 — see `journal.Journals`

    def open(self, execution: Execution) -> Recorder: ...
    def in_thread(self, execution: Execution) -> Ledger: ...
    def done_in_loop(self, doing_it: Coroutine[Any, Any, T]) -> T: ...


class Waited(Protocol):
    """Who reads the results of what a task has waited for."""

    # ruff: noqa: D102 — what each does stands at `DependencyResults`

    async def of(self, id_: str) -> dict[tuple[str, str], Any]: ...
    def in_thread(self, id_: str, *, plain: bool = False) -> dict[tuple[str, str], Any]: ...


class Runner(Protocol):
    """Who runs the handler: the executor."""

    @property
    def state(self) -> Any:
        """What the workers of this process have opened for their handlers."""

    def unwind(self, execution: Execution) -> None:
        """See to it that the handler ends, which is put aside."""

    def obey(self, execution: Execution) -> None:
        """Cancel the handler, which was told to stop."""

    def obey_soon(self, execution: Execution) -> None:
        """Do so, asked from any thread."""

    def begins_soon(self, execution: Execution) -> None:
        """Count its run time, asked from any thread: a child process is about to run the handler."""


class Elsewhere(Protocol):
    """The child process that runs the handler."""

    def lease_changed(self) -> None:
        """Tell it until when it may go on; in any thread."""


class Execution:
    """The state of one execution.

    Belongs to the event loop, but for two things: the lease, which the pinger's thread renews, and the decision whether it was
    told to stop before it ended, which is taken under the lock.

    There are thousands a second, and most of them log nothing, publish nothing and are never stopped: what such an execution
    does not need is its class's.
    """

    elsewhere: Elsewhere | None = None
    """The child process that it runs in, while it does."""
    left = False
    """Whether its handler has really ended, after it was stopped from outside."""
    secrets: tuple[str, ...] = ()
    """What must stand in no log and no reason: the texts in those of its params that are not to be shown."""
    loop: Loop | None = None
    """How its task runs again and again, if it does: then it holds no slot, and its end is not that of the task."""
    recorded = False
    """Whether `transaction()` has recorded SUCCESS already."""
    hushed = False
    """Whether nothing may be written to its task, since a `transaction()` is open that will."""
    batched = False
    """Whether its handler is called for a batch, of which it is one."""
    suspended_for: Document | None = None
    """What it waits for, once it is put aside: whatever its handler does from then on, that is how it ends."""
    session_id: Any = None
    """Of its transaction, if it has begun one."""
    span: ProcessSpan | None = None
    """Of its trace, if somebody traces."""
    returns: Returns = PLAIN
    """What its handler returns, once that is known."""
    errors: ErrorPolicy = NO_POLICY
    """Which errors are tried again, once its handler is known."""
    published_before = 0
    """How many of its publications are older than its `transaction()`."""
    publications: list[Publication] | tuple[()] = ()
    run_time = UNLIMITED
    """How long it may still take."""
    task: asyncio.Task[Any] | None = None
    """What runs the handler after its first step, until that has really ended."""
    concluding: asyncio.Task[Any] | None = None
    """What brings it to its outcome where that takes time after it is judged."""
    silent_until = 0.0
    """Until when not to ping, whatever is due."""
    stop_reason: Stop | None = None
    """Why it was told to stop, if it was: see `tell_to_stop`."""
    handler_running = False
    hook_running = False
    """Whether `after` is, which nothing stops but the end of the worker."""
    judged = False
    """Whether it is said how it ended: what its handler still does counts no more."""
    ended = False
    """Whether its outcome is decided, so that nothing can stop it any more: it is judged, or its transaction commits."""
    handler_done: asyncio.Event | None = None
    """Set when the handler has really ended, if that may be later: a thread, or what ignores its cancellation."""
    result: Any = None
    as_task: Any = None
    """The `Task` that hooks are shown."""
    recorded_or_lost = False
    """Whether its outcome is recorded, or lost with the lease: so that its lease is of no interest any more."""
    _option: TaskOption | None = None
    _stored_params: Document | None = None
    """The params as they stand in the document, if they had to be decrypted."""
    _journal: Recorder | None = None
    _report: Report | None = None
    """What it has told on its way, if it has told anything."""

    def __init__(
        self,
        document: Document,
        running_id: str,
        worker_id: str,
        claim_sent: float,
        clock: ServerClock,
        *,
        runner: Runner,
        reports: Reports,
        publisher: Publisher,
        blocks: Blocks,
        journals: Journals,
        waited: Waited,
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
        self._runner = runner
        self._reports = reports
        self.publisher = publisher
        self._blocks = blocks
        self._journals = journals
        self._waited = waited
        self.renewed(claim_sent)
        if (limit_ms := self.stored_option.get("run_timeout_ms")) is not None:
            self.run_time = RunTime(limit_ms)

    # --- its params ---

    @property
    def has_boxed_params(self) -> bool:
        """Whether they have to be opened."""
        params = self.document.get("params")
        return isinstance(params, dict) and any(map(is_boxed, params.values()))

    async def open_params(self) -> None:
        """Fetch what is stored apart, and decrypt. Raises `CannotDecrypt`, `PayloadMissing`."""
        if self.has_boxed_params:
            self.document = await self.publisher.fetched(self.document)
            self._stored_params = params = self.document["params"]
            payloads = self.publisher.payloads
            self.document["params"] = payloads.unsealed_params(self.id, params)
            # The longest first: one may begin like another.
            self.secrets = tuple(sorted(payloads.secrets_in(self.id, params), key=len, reverse=True))

    def shown(self) -> Task:
        """Return the task for hooks: what is secret stays so."""
        payloads = self.publisher.payloads
        if self._stored_params is None:
            return payloads.task(self.document)
        params = self.document["params"] | payloads.shown_params(self.id, self._stored_params)
        return payloads.task(self.document | {"params": params})

    # --- the lease ---

    def renewed(self, sent: float) -> None:
        """Note a renewal that was sent at this monotonic time: the lease is trusted from then, less a margin."""
        self.leased(sent, self.stored_option["worker_timeout_ms"] / 1000)
        self._ping_due = sent + self.ping_every_s

    @property
    def next_ping(self) -> float:
        """When to ask for renewal (monotonic)."""
        return max(self._ping_due, self.silent_until)

    @next_ping.setter
    def next_ping(self, moment: float) -> None:
        self._ping_due = moment

    @property
    def ping_every_s(self) -> float:
        """How often to ask for renewal: as the option says, but well before the lease is over."""
        option = self.stored_option
        return float(min(option["ping_interval_ms"], option["worker_timeout_ms"] * _LATEST_PING_SHARE) / 1000)

    def leased(self, sent: float, seconds: float) -> None:
        """Trust the lease for so long from when it was asked for, less a margin."""
        self.lease_until = sent + seconds - min(seconds * _MARGIN_SHARE, _LARGEST_MARGIN_S)
        if (elsewhere := self.elsewhere) is not None:  # read once: other threads set it
            elsewhere.lease_changed()

    def ping_again(self, now: float) -> None:
        """Plan the next try after a ping that failed."""
        self.next_ping = now + min(self.stored_option["ping_interval_ms"] / 4000, 1.0)

    # --- what a handler may ask (see context.Running) ---

    @property
    def pipeline(self) -> asyncio.Task[Any] | None:
        """Whatever is still to hand its outcome on."""
        return self.concluding if self.judged else self.task

    @property
    def option(self) -> TaskOption:
        """The task's option as of the claim."""
        if self._option is None:
            self._option = TaskOption(**self.stored_option)
        return self._option

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields of its task that are not taskmesh's, as of the claim."""
        return {name: value for name, value in self.document.items() if name not in Task.OWN_FIELDS}

    @property
    def attempt(self) -> int:
        """Which execution of the task this is, from 1."""
        return int(self.failures + self.document["task_state"].get("lost_cnt", 0) + 1)

    @property
    def failures(self) -> int:
        """How many executions of the task had failed when this one claimed it."""
        state = self.document["task_state"]
        fails = sum(entry["state"] == "FAIL" for entry in state["worker_states"])
        return int(fails + state.get("dropped_fail_cnt", 0))

    @property
    def deadline(self) -> datetime | None:
        """When `run_timeout_ms` is over, by the server's clock."""
        left = self.run_time.left_s
        return None if left is None else self._clock.now() + timedelta(seconds=left)

    async def dependencies(self) -> dict[tuple[str, str], Any]:
        """See `TaskContext.dependencies`."""
        return await self._waited.of(self.id)

    def blocking_dependencies(self) -> dict[tuple[str, str], Any]:
        """See `BlockingTaskContext.dependencies`."""
        return self._waited.in_thread(self.id)

    def dependencies_for_a_child(self) -> dict[tuple[str, str], Any]:
        """Return the same in plain values: a child process may not know the types."""
        return self._waited.in_thread(self.id, plain=True)

    @property
    def state(self) -> Any:
        """What the worker has opened for its handlers."""
        return self._runner.state

    @property
    def leaving(self) -> bool:
        """Whether it was stopped from outside, and its handler may still be at work: its place is kept."""
        return self.stop_reason in FROM_OUTSIDE and not self.left

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop. True is final: it has told the handler so, and the execution is judged by that."""
        return self.suspended_for is not None or self.is_told_to_stop()

    def is_told_to_stop(self) -> bool:
        """Say so, and if the lease is over decide it here and now, before the handler hears of it."""
        if self.stop_reason is None and time.monotonic() >= self.lease_until:
            self.tell_lease_is_over()
        return self.stop_reason is not None

    def tell_lease_is_over(self) -> None:
        """Decide it, in whatever thread, for a handler that has heard or is about to hear of it."""
        if self.tell_to_stop(Stop.LEASE_LOST):
            self._runner.obey_soon(self)

    def stop(self, reason: Stop) -> None:
        """Make it stop: its handler is cancelled. The first reason stands. In the event loop."""
        if self.tell_to_stop(reason):
            self._runner.obey(self)

    def begins_elsewhere(self) -> None:
        """A child process is about to run the handler. In any thread."""
        self._runner.begins_soon(self)

    def cut_hook_short(self) -> None:
        """Wait no longer for `after`: the worker ends, and there is an outcome to record."""
        if self.hook_running and self.concluding is not None:
            self.concluding.cancel()

    def tell_to_stop(self, reason: Stop) -> bool:
        """Decide that the handler is to stop; from any thread. False if its outcome is decided, or it was told before."""
        with _lock:
            if self.ended or self.stop_reason is not None:
                return False
            self.stop_reason = reason
            return True

    # --- its journal ---

    @property
    def journal(self) -> Recorder:
        """What it has recorded; in the event loop."""
        self._check_alone("steps, sleeps, waits and children")
        if self._journal is None:
            self._journal = self._journals.open(self)
        return self._journal

    @property
    def ledger(self) -> Ledger:
        """The journal, for a handler that blocks in a thread."""
        self._check_alone("steps, sleeps, waits and children")
        return self._journals.in_thread(self)

    @property
    def records(self) -> bool:
        """Whether its handler has asked for a step, a sleep or the like."""
        return self._journal is not None

    def _check_alone(self, what: str) -> None:
        if self.batched:
            raise TaskMeshError(
                f"task {self.name!r} {self.key!r}: {what} are not for the handler of a batch, whose tasks share one call: "
                "publish a task without batch for that"
            )

    def suspend(self, wait: Document) -> None:
        """Put the task aside until this has come: that is how this execution ends. In the event loop."""
        with _lock:
            self.suspended_for = wait
        self.run_time.stand_still()
        self._runner.unwind(self)

    def check_goes_on(self) -> None:
        """Raise `TaskSuspended` if it is put aside, `LeaseLost` if nothing that it writes counts any more."""
        if self.suspended_for is not None:
            raise TaskSuspended(self.suspended_for["kind"], self.suspended_for["name"])
        self.check_lease()

    def set_progress(self, fraction: float, message: str | None) -> None:
        """Keep the newest progress; it is written soon."""
        self.check_goes_on()
        share, text = checked_progress(fraction, message)
        self._begun_report().set_progress(share, None if text is None else self._kept_text(text), self._clock.now())
        self._report_soon()

    def log(self, message: str) -> None:
        """Keep a line; it is written soon."""
        self._begun_report().add_line(self._kept_text(line_of(message)), self._clock.now())
        self._report_soon()

    def _begun_report(self) -> Report:
        with _lock:
            if self._report is None:
                self._report = Report()
            return self._report

    def redacted(self, text: str) -> str:
        """Return the text with stars for what is not to be shown."""
        for secret in self.secrets:
            text = text.replace(secret, "**********")
        return text

    def _kept_text(self, text: str) -> str:
        return self.publisher.payloads.sealed_text(self.id, self.redacted(text))

    async def publish(self, definition: Publishable | str, key: str, params: Mapping[str, Any]) -> None:
        """Keep a task to be published with this execution's SUCCESS. Raises what publishing it would."""
        self.check_goes_on()
        definition = await self.publisher.known(definition)
        after = definition.configuration.told_after
        if after is None:
            after = await self.publisher.after_of(definition.name, key)
        publication = self.publisher.publication_of(definition, key, params, after)
        if publication.configuration.after:
            await self._check_after(publication)
        self._add_publication(publication)

    def publish_in_thread(self, definition: Publishable | str, key: str, params: Mapping[str, Any]) -> None:
        """Keep a task to be published with this execution's SUCCESS, asked from a thread that is not the event loop's."""
        if isinstance(definition, str) or definition.broadcast or _asks_first(definition.configuration):
            return self._journals.done_in_loop(self.publish(definition, key, params))
        self.check_goes_on()
        return self._add_publication(self.publisher.publication_of(definition, key, params))

    def after_in_thread(self, name: str, key: str) -> After | None:
        """Return what a task that is there waits for, or has waited for: for a child process, which cannot look."""
        return self._journals.done_in_loop(self.publisher.after_of(name, key))

    async def _check_after(self, publication: Publication) -> None:
        """Raise `TaskNotFound` for what it is to wait for, unless that is there or is published before it by this handler."""
        if not self.hushed:  # what the handler has published in its `transaction()` is seen in that alone, at its end
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
        """Whether a `transaction()` is open, whose result can be said."""
        return self.hushed and not self.recorded

    def set_result(self, value: Any) -> None:
        """Keep the result for the end of a `transaction()`."""
        self.result = value

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a block that commits with the SUCCESS."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._blocks.in_loop(self)

    def blocking_transaction(self) -> AbstractContextManager[Any]:
        """Open such a block from a thread."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._blocks.in_thread(self)

    def in_transaction(self, fn: Callable[[Any], Awaitable[Any]]) -> Awaitable[Any]:
        """Call `fn` in such a block, again at each conflict."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._blocks.again_in_loop(self, fn)

    def blocking_in_transaction(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn` in such a block from a thread, again at each conflict."""
        self._check_alone("transactions")
        self.check_goes_on()
        return self._blocks.again_in_thread(self, fn)

    @property
    def conflicts(self) -> int:
        """How many executions in a row ended before it since their `transaction()` met a conflict."""
        return int(self.document["task_state"].get("conflict_cnt") or 0)

    def check_lease(self) -> None:
        """Raise `LeaseLost` if nothing that this execution writes counts any more."""
        if self.stop_reason is not None and (self.stop_reason is Stop.LEASE_LOST or self.stop_reason in FROM_OUTSIDE):
            raise LeaseLost(
                f"task {self.name!r} {self.key!r}: {self.stop_reason.value}, so this execution writes nothing any more"
            )

    def judge(self) -> Stop | None:
        """Its handler's end counts, or its silence: nothing tells it to stop any more. Return why it was told before."""
        with _lock:
            self.judged = self.ended = True
            return self.stop_reason

    def commit(self) -> Stop | None:
        """Decide that it SUCCEEDs, unless it was told to stop before: return why. What it publishes later is refused."""
        with _lock:
            self.ended = self.ended or self.stop_reason is None
            return self.stop_reason

    def commit_failed(self) -> None:
        """After a `transaction()` that came to nothing: go on as before."""
        with _lock:
            self.ended = self.judged

    def _report_soon(self) -> None:
        if not self.hushed:
            self._reports.add(self)

    def speak_again(self) -> None:
        """After a `transaction()` that failed: ping at once, and report what was held back."""
        self.hushed = False
        self.silent_until = 0.0
        self.next_ping = time.monotonic()
        self._report_soon()

    # --- the outcome ---

    def outcome(self, kind: Any, entry: Mapping[str, Any], size: int = 0, delay_ms: int | None = None) -> Outcome:
        """Return how this execution ended, with its logs and progress: the last report of them may have failed."""
        told = self._report
        logs, progress, untold = (told.logs(), told.progress, told.progress_untold) if told else ({}, None, False)
        size += told.size if told else 0
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
            untold,
            size,
            concerns_others="pending" in self.document["task_state"],
        )

    def report(self) -> Outcome | None:
        """Return what is new in logs and progress, to be written while the execution goes on."""
        logs, progress = self._report.unwritten() if self._report is not None else ({}, None)
        return Outcome(self.id, self.running_id, "succeeded", logs, None, progress) if logs or progress else None

    def report_failed(self, report: Outcome) -> None:
        """Tell again, a little later, what could not be written."""
        self._begun_report().not_written(dict(report.entry), report.progress)
        self._report_soon()


def _asks_first(configuration: Configuration) -> bool:
    """Whether a publication cannot be checked without the database."""
    return bool(configuration.after) or configuration.told_after is None
