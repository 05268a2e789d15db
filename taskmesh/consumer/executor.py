"""The executor: takes each execution through one visible pipeline.

    check params → before → run the handler → judge how it ended → after → hand the outcome to the finisher

Async handlers run in the event loop, each in an asyncio task of its own that starts at once; plain functions run in threads;
`run="process"` handlers run in processes. However a handler ends, only its own execution is affected. An execution is judged at
the moment its handler ends, before anybody can change what it returned; or, if its asyncio task ends without that, by the
task's done callback.

If the process dies before the outcome is recorded, the lease runs out and the task runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from taskmesh.client.batch import ITEM
from taskmesh.client.definition import TaskDefinition
from taskmesh.client.publisher import Publisher
from taskmesh.consumer.candidates.claim_queue import ClaimQueue
from taskmesh.consumer.candidates.failure_counts import FailureCounts
from taskmesh.consumer.candidates.limits import Limits
from taskmesh.consumer.durable.journal import Journals
from taskmesh.consumer.hooks import AfterHook, Ending
from taskmesh.consumer.lifespan import Lifespan
from taskmesh.consumer.run.batches import Batches
from taskmesh.consumer.run.context import BlockingTaskContext, TaskContext, enter, fields_of
from taskmesh.consumer.run.dependency_results import DependencyResults
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.executions import Executions
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.run.outcome import (
    Successes,
    failed_by,
    failure,
    judged,
    moved,
    snoozed,
    stopped,
    success,
    suspended,
)
from taskmesh.consumer.run.pinger import Pinger
from taskmesh.consumer.run.reporter import Reporter
from taskmesh.consumer.run.run_time import UNLIMITED
from taskmesh.consumer.run.stop_reasons import FROM_OUTSIDE, Stop
from taskmesh.consumer.run.tracing import process_span
from taskmesh.consumer.settings import Settings
from taskmesh.model.errors import LeaseLost, TaskFailed, TaskMeshError
from taskmesh.model.stage import Next
from taskmesh.store.clock import ServerClock
from taskmesh.store.finish import Outcome
from taskmesh.store.mongodb.driver import Document
from taskmesh.store.mongodb.first_step import FirstSteps

if TYPE_CHECKING:
    from taskmesh.consumer.subprocess.processes import Processes

logger = logging.getLogger("taskmesh.executor")

_UNWINDS_WITHIN_S = 10.0
"""How long the handler of a suspended execution may take to clean up before it is cancelled."""
_SUCCESSES = ("succeeded", "looped")
_PUBLISHING = (*_SUCCESSES, "moved")
"""The outcomes with which a handler's publications are published, since no handler will run again to make them."""
_CANCELLED_ENDS_WITHIN_S = 10.0
"""How long a cancelled handler may take to clean up before its outcome is recorded without waiting for it."""


class Executor:
    """The executions of one consumer."""

    def __init__(
        self,
        publisher: Publisher,
        definitions: Mapping[str, TaskDefinition[Any, Any]],
        settings: Settings,
        clock: ServerClock,
        executions: Executions,
        candidates: ClaimQueue,
        limits: Limits,
        pinger: Pinger,
        reporter: Reporter,
        journals: Journals,
        finisher: Finisher,
        dependents: Dependents,
        *,
        failures: FailureCounts,
        dependency_results: DependencyResults,
        lifespan: Lifespan[Any] | None,
    ) -> None:
        self._publisher = publisher
        self._definitions = definitions
        self._loop = asyncio.get_running_loop()
        self._first_steps = FirstSteps(self._loop)
        self._worker_id = settings.worker_id
        self._labels = settings.labels
        self._before = settings.before
        self._after = settings.after
        self._observer = settings.observer
        self._clock = clock
        self._executions = executions
        self._candidates = candidates
        self._limits = limits
        self._pinger = pinger
        self._reporter = reporter
        self._transactions = journals.transactions
        self._journals = journals
        self._finisher = finisher
        self._dependents = dependents
        self._failures = failures
        self._dependency_results = dependency_results
        self._lifespan = lifespan
        self._batches = Batches(settings)
        self._successes = Successes(settings.worker_id)
        self._threads = anyio.CapacityLimiter(1)
        self._processes: Processes | None = None

    # --- start and stop ---

    def start(self, documents: Sequence[Document], running_id: str, claim_sent: float) -> None:
        """Start executing claimed tasks.

        All of them are registered before the first handler runs, since that may block the loop.
        """
        for execution in [self._new_execution(document, running_id, claim_sent) for document in documents]:
            task = self._first_steps.begun(self._handle(execution), f"task {execution.id}")
            if not task.done():
                execution.task = task
                task.add_done_callback(partial(self._task_is_over, execution))
            elif not execution.judged:  # an error of our own
                self._handler_ended(execution, None, _error_of(task))

    def _new_execution(self, document: Document, running_id: str, claim_sent: float) -> Execution:
        """Create the execution of a claimed task: it holds a slot, and its lease is renewed."""
        execution = Execution(
            document,
            running_id,
            self._worker_id,
            claim_sent,
            self._clock,
            executor=self,
            reporter=self._reporter,
            publisher=self._publisher,
            transactions=self._transactions,
            journals=self._journals,
            dependency_results=self._dependency_results,
        )
        loop = self._definitions[execution.name].loop
        if loop is not None and execution.key == loop.key(self._worker_id, self._labels):
            execution.loop = loop
        self._executions[execution.id] = execution
        self._executions.started += 1
        self._pinger.expect(execution.ping_every_s)
        return execution

    def obey(self, execution: Execution) -> None:
        """Cancel the handler of an execution that was told to stop."""
        reason = execution.stop_reason
        if reason is Stop.LEASE_LOST:
            logger.warning(
                "lease lost: task %s, execution %s", execution.id, execution.running_id, extra=fields_of(execution)
            )
        elif reason is not None and reason is not Stop.TIMEOUT:
            logger.info(
                "stopping %s (%s): %s", execution.id, execution.running_id, reason.value, extra=fields_of(execution)
            )
        if execution.handler_running and execution.task is not None:
            execution.task.cancel()
            if reason is not Stop.WORKER_STOPS:
                self._loop.call_later(_CANCELLED_ENDS_WITHIN_S, self._go_on_without, execution)

    @property
    def state(self) -> Any:
        """What `@mesh.lifespan` has yielded in this process. Raises `TaskMeshError` if there is nothing."""
        if self._lifespan is None:
            raise TaskMeshError("there is no state: this mesh has no @mesh.lifespan, whose function yields it")
        return self._lifespan.state

    def unwind(self, execution: Execution) -> None:
        """Give the handler of a suspended execution some time to unwind, then cancel it."""
        self._loop.call_later(_UNWINDS_WITHIN_S, self._end_unwinding, execution)

    def _end_unwinding(self, execution: Execution) -> None:
        if not execution.judged and execution.task is not None:
            text = "the handler of task %s is put aside and goes on all the same: cancelling it"
            logger.warning(text, execution.id, extra=fields_of(execution))
            execution.task.cancel()
            self._loop.call_later(_CANCELLED_ENDS_WITHIN_S, self._go_on_without, execution)

    def obey_soon(self, execution: Execution) -> None:
        """Cancel it soon. Callable from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nothing left to cancel
            self._loop.call_soon_threadsafe(self.obey, execution)

    def _go_on_without(self, execution: Execution) -> None:
        """Judge an execution whose handler ignores its cancellation. As with a thread, its slot stays occupied."""
        if not execution.ended:
            execution.handler_done = asyncio.Event()
            self._finish(execution, judged(execution, None, asyncio.CancelledError()))

    # --- the pipeline ---

    async def _handle(self, execution: Execution) -> None:
        """Run the handler, with what comes before it. One coroutine does both, since there are thousands per second."""
        try:
            execution.span = process_span(execution)
            definition = self._definitions[execution.name].on(execution.queue)
            execution.returns, execution.errors = definition.returns, definition.errors
            _check_is_no_second(execution, definition)
            if execution.has_boxed_params:
                await execution.open_params()
            if self._dependency_results.are_wanted(definition.params, execution.document):
                await self._dependency_results.feed(definition.params, execution.document)
            args, kwargs = definition.params.to_run(execution.document.get("params") or {})
            if self._before is not None or self._after is not None:
                execution.as_task = execution.shown()
            self._count_run_time(execution)
            if self._before is not None:
                await self._call_before(execution, self._before(execution.as_task))
            execution.handler_running = True
            if execution.stop_reason is not None:
                raise asyncio.CancelledError  # noqa: TRY301 — as if at the handler's first line
            if definition.batch:
                self._tell_start(execution)
                value = await self._batches.value_of(execution, definition, kwargs[ITEM])
            elif definition.run == "async":
                enter(TaskContext(execution))
                self._tell_start(execution)
                value = await definition.fn(*args, **kwargs)
            elif definition.run == "thread":
                value = await self._call_in_thread(execution, definition, args, kwargs)
            else:
                self._tell_start(execution)
                execution.run_time.stand_still()  # until the child has started, and its handler begins
                value = await self._call_in_process(execution, definition, args, kwargs)
            if isinstance(value, Next):
                raise value  # noqa: TRY301 — returned or raised, it says the same
        except BaseException as error:  # noqa: BLE001 — whatever a handler raises ends its own execution and nothing else
            await self._end_steps(execution, error)
            self._handler_ended(execution, None, error)
        else:
            self._handler_ended(execution, value, None)

    async def _end_steps(self, execution: Execution, error: BaseException) -> None:
        """Wait for the steps that a failed handler has left under way. Those of a child process have ended with it."""
        failed = isinstance(error, Exception) and execution.records
        if failed and self._definitions[execution.name].on(execution.queue).run != "process":
            with contextlib.suppress(asyncio.CancelledError):  # it was told to stop meanwhile, which takes precedence
                await execution.journal.end_steps()

    def _task_is_over(self, execution: Execution, task: asyncio.Task[None]) -> None:
        """Make sure that the handler's end is judged, whatever became of its asyncio task. Nothing bypasses this."""
        if execution.task is not None:
            self._handler_ended(execution, None, _error_of(task))

    def _handler_ended(self, execution: Execution, value: Any, error: BaseException | None) -> None:
        """Judge how the handler ended, unless the execution has been judged already."""
        execution.task = None
        execution.handler_running = False
        execution.run_time.stand_still()
        if not execution.judged:
            self._finish(execution, judged(execution, value, error))
        elif execution.handler_done is not None:
            execution.handler_done.set()

    def _finish(self, execution: Execution, ending: Ending) -> None:
        """Call the hook `after`, then bring the execution to its outcome."""
        if self._after is None or execution.as_task is None:
            self._conclude(execution, ending)
        else:
            execution.hook_running = True
            hook = self._call_after(execution, self._after, ending)
            self._go_on(execution, hook, lambda _: self._conclude(execution, ending))

    def _go_on(
        self, execution: Execution, step: Coroutine[Any, Any, None], then: Callable[[BaseException | None], None]
    ) -> None:
        """Await a step that takes time after the execution is judged, then call `then` with what the step raised."""

        def over(task: asyncio.Task[None]) -> None:
            execution.concluding = None
            then(asyncio.CancelledError() if task.cancelled() else task.exception())

        execution.concluding = self._loop.create_task(step, name=f"end of task {execution.id}")
        execution.concluding.add_done_callback(over)

    async def _call_after(self, execution: Execution, after: AfterHook, ending: Ending) -> None:
        try:
            await _maybe(after(execution.as_task, ending))
        except BaseException:  # SystemExit would end the event loop
            logger.exception("the hook 'after' failed for task %s", execution.id, extra=fields_of(execution))
        finally:
            execution.hook_running = False

    async def _call_before(self, execution: Execution, called: Awaitable[None] | None) -> None:
        """Wait for the hook `before`. A stop cancels it as it would cancel the handler."""
        execution.handler_running = True
        try:
            await _maybe(called)
        finally:
            execution.handler_running = False

    def _count_run_time(self, execution: Execution) -> None:
        """Start counting the run time, now that user code is about to run: it ends when `run_timeout_ms` is over."""
        if execution.run_time is not UNLIMITED and not execution.judged:
            execution.run_time.go_on(partial(execution.stop, Stop.TIMEOUT))

    def begins_soon(self, execution: Execution) -> None:
        """Start counting the run time soon. Callable from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._count_run_time, execution)

    def _tell_start(self, execution: Execution) -> None:
        if self._observer is not None:
            self._observer.started(execution.name, time.monotonic() - execution.started)

    async def _call_in_thread(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        loop = asyncio.get_running_loop()
        done = execution.handler_done = asyncio.Event()
        begun = threading.Lock()
        """Taken by whoever decides first: the thread, that the handler runs, or a stop, that it never will."""

        def call() -> Any:
            if not begun.acquire(blocking=False):
                return None
            enter(BlockingTaskContext(execution))
            self._tell_start(execution)
            try:
                return definition.fn(*args, **kwargs)
            except StopIteration as error:  # it cannot be raised through a future
                raise RuntimeError("the handler raised StopIteration") from error
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(done.set)

        # No limit of its own is needed: each execution holds a slot of the consumer. This one only must not be tighter.
        self._threads.total_tokens = max(self._threads.total_tokens, len(self._executions) + 8)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except BaseException:
            if begun.acquire(blocking=False):
                done.set()
            raise

    async def _call_in_process(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self._processes is None:
            # Files are read, so this is not done in the loop.
            await asyncio.to_thread(importlib.import_module, "taskmesh.consumer.subprocess.conversation")
        from taskmesh.consumer.subprocess.conversation import Conversation  # noqa: PLC0415 — few need it
        from taskmesh.consumer.subprocess.processes import Processes  # noqa: PLC0415 — and it is POSIX's alone

        if self._processes is None:
            self._processes = Processes()
        return await Conversation(self._processes, self._transactions, execution, definition, args, kwargs).outcome()

    async def close(self) -> None:
        """Release what is kept for the next execution."""
        self._successes.tell_rest()
        if self._processes is not None:
            await self._processes.close()

    def _conclude(self, execution: Execution, ending: Ending) -> None:
        """Bring an execution to its outcome.

        Every execution gets one, whatever fails here; else it would hold its slot for ever.
        """
        try:
            self._hand_over(execution, ending)
        except Exception as error:
            logger.exception("unexpected error, not the handler's, at the end of task %s", execution.id)
            if not execution.recorded_or_lost:
                self._record(execution, failure(execution, failed_by(error)))

    def _hand_over(self, execution: Execution, ending: Ending) -> None:
        """Turn the ending into an outcome, and hand it to the finisher."""
        if execution.span is not None:
            execution.span.end(ending)
        if self._observer is not None:
            self._observer.ended(execution.name, ending.kind, time.monotonic() - execution.started)
        if execution.recorded:
            self._succeeded(execution)
            self._over(execution, recorded=True)
            return
        if ending.kind == "succeeded":
            outcome = success(execution, ending.value)
        elif ending.kind == "failed":
            outcome = failure(execution, ending)
        elif ending.kind == "snoozed":
            outcome = snoozed(execution, ending)
        elif ending.kind == "suspended":
            outcome = suspended(execution)
        elif ending.kind == "moved" and isinstance(ending.error, Next):
            outcome = moved(execution, self._definitions[execution.name].on(ending.error.queue), ending.error)
        elif ending.kind == "released":
            outcome = execution.outcome("released", {})
        elif execution.stop_reason in FROM_OUTSIDE:
            execution.recorded_or_lost = True
            self._after_handler(execution, lambda: self._leave(execution))  # until then it keeps its place
            return
        else:
            self._over(execution, recorded=False)
            return
        if outcome.kind in _PUBLISHING and execution.publications:
            recording = self._transactions.record(execution, outcome)
            self._go_on(execution, recording, partial(self._recorded_with_publications, execution, outcome))
            return
        self._record(execution, outcome)

    def _record(self, execution: Execution, outcome: Outcome) -> None:
        """Have the outcome recorded. The execution is over when that is done, or when its lease is lost."""

        def over(recorded: bool) -> None:
            self._executions.recording.discard(execution)
            if outcome.kind in _SUCCESSES and recorded:
                self._succeeded(execution, concerns_others=outcome.concerns_others)
            elif recorded and (outcome.kind == "failed" or (outcome.step or {}).get("kind") == "join"):
                self._dependents.finished(execution.id)
            if recorded and outcome.kind == "failed":
                self._failures.note(execution, failed=True)
            self._over(execution, recorded=recorded)

        if execution.handler_done is None or execution.handler_done.is_set():  # one that goes on keeps its slot
            if execution.loop is None:
                self._executions.recording.add(execution)
            self._slot_freed()
        self._finisher.add(outcome, over)

    def _recorded_with_publications(self, execution: Execution, outcome: Outcome, error: BaseException | None) -> None:
        """Conclude: outcome and published tasks were recorded together or, with an `error`, not recorded."""
        if error is None:
            if outcome.kind in _SUCCESSES:
                self._succeeded(execution, concerns_others=outcome.concerns_others)
            for publication in execution.publications:
                if publication.configuration.after or publication.configuration.sequence_key is not None:
                    self._dependents.finished(publication.id)  # it waits for others, and is looked at now
            self._over(execution, recorded=True)
        elif isinstance(error, LeaseLost):
            self._over(execution, recorded=False)
        else:
            self._record(execution, failure(execution, failed_by(error)))

    def _succeeded(self, execution: Execution, *, concerns_others: bool = True) -> None:
        """Its SUCCESS is recorded and confirmed by a majority."""
        self._successes.tell(execution)
        self._failures.note(execution, failed=False)
        if concerns_others and execution.loop is None:
            self._dependents.finished(execution.id)

    def _over(self, execution: Execution, *, recorded: bool) -> None:
        """The outcome is recorded or lost: free the slot as soon as the handler has really ended."""
        execution.ended = True
        execution.recorded_or_lost = True
        if not recorded and execution.stop_reason is None:
            logger.warning(
                "the outcome of task %s came too late: execution %s had lost its lease",
                execution.id,
                execution.running_id,
                extra=fields_of(execution),
            )
        if execution.handler_done is None:
            self._free(execution, recorded=recorded)
        else:
            self._after_handler(execution, lambda: self._free(execution, recorded=recorded))

    def _leave(self, execution: Execution) -> None:
        """Give up the place that a handler has kept since its execution was stopped from outside."""
        execution.left = True
        self._record(execution, stopped(execution))

    def _after_handler(self, execution: Execution, then: Callable[[], None]) -> None:
        """Call `then` as soon as a handler that cannot be interrupted has really ended."""
        if execution.handler_done is None or execution.handler_done.is_set():
            then()
            return
        logger.warning(
            "the handler of task %s is still running after its execution has ended: its slot stays occupied",
            execution.id,
            extra=fields_of(execution),
        )
        self._go_on(execution, _set(execution.handler_done), lambda _: then())

    def _free(self, execution: Execution, *, recorded: bool) -> None:
        is_here = self._executions.get(execution.id) is execution
        if not recorded:
            # It may have been stopped from outside without our knowledge: then this note frees its place.
            slot = self._limits.slot_in_doubt(execution.id) if is_here else None
            self._finisher.add(stopped(execution), partial(self._limits.free, slot))
        elif is_here:
            self._limits.ended(execution.id)
        if is_here:
            del self._executions[execution.id]
            self._executions.finished += 1
            if execution.loop is not None:
                self._executions.loop_ended.set()
            self._slot_freed()

    def _slot_freed(self) -> None:
        """Notify everybody who waits for a slot, or for what runs."""
        self._executions.freed.set()
        self._candidates.ready.set()


def _check_is_no_second(execution: Execution, definition: TaskDefinition[Any, Any]) -> None:
    """Raise `TaskFailed` for a second task of a loop, published by somebody who does not know that it is a loop."""
    if definition.loop is not None and execution.loop is None:
        raise TaskFailed(
            f"{execution.name!r} is a loop or a singleton: its tasks are those that workers publish themselves"
        )


def _error_of(task: asyncio.Task[None]) -> BaseException:
    """Return what ended an asyncio task that has not judged its execution."""
    error = None if task.cancelled() else task.exception()
    return error or asyncio.CancelledError()


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
