"""The executor: one execution is one visible pipeline.

    check params → before → run the handler → judge how it ended → after → hand the outcome to the finisher

Async handlers run in the event loop, each in an asyncio task of its own; plain functions in threads; `run="process"` in
processes of their own. A handler's end, whatever it is, concerns its own execution alone.

If the process dies before the outcome is recorded, the lease runs out and the task runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from taskmesh.clock import ServerClock
from taskmesh.consumer.ending import Ending, ending_of, ending_with, failed_by, failure, snoozed, stopped
from taskmesh.consumer.execution import Execution, Stop
from taskmesh.consumer.finisher import Fate, Finisher
from taskmesh.consumer.observer import Observer
from taskmesh.consumer.pinger import Pinger
from taskmesh.consumer.reasons import unstorable_text
from taskmesh.consumer.successes import Successes
from taskmesh.consumer.transactions import Transactions
from taskmesh.context import BlockingTaskContext, TaskContext, enter
from taskmesh.definition import TaskDefinition
from taskmesh.errors import LeaseLost
from taskmesh.logs import fields_of
from taskmesh.store import Store
from taskmesh.store.driver import Document
from taskmesh.store.finish import Outcome
from taskmesh.store.publish import Publication
from taskmesh.task import Task
from taskmesh.tracing import process_span
from taskmesh.values import TooLarge, Unstorable, kept

if TYPE_CHECKING:
    from taskmesh.consumer.processes import Processes

logger = logging.getLogger("taskmesh.executor")

_MANY_SLOTS = 50
_CANCELLED_ENDS_WITHIN_S = 10.0
"""How long a cancelled handler may take to clean up, until its outcome is recorded without it."""

BeforeHook = Callable[[Task], Awaitable[None] | None]
AfterHook = Callable[[Task, "Ending"], Awaitable[None] | None]


class Executor:
    """The executions of one consumer."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        clock: ServerClock,
        finisher: Finisher,
        pinger: Pinger,
        definitions: Mapping[str, TaskDefinition[Any, Any]],
        *,
        before: BeforeHook | None,
        after: AfterHook | None,
        slot_freed: Callable[[], None],
        report: Callable[[Execution], None],
        reports_written: Callable[[], Awaitable[None]],
        make_publication: Callable[[Any, str, Mapping[str, Any]], Publication],
        observer: Observer | None = None,
    ) -> None:
        self._store = store
        self._worker_id = worker_id
        self._clock = clock
        self._finisher = finisher
        self._pinger = pinger
        self._definitions = definitions
        self._before = before
        self._after = after
        self._slot_freed = slot_freed
        self._report = report
        self._make_publication = make_publication
        self._observer = observer
        self._transactions = Transactions(store, worker_id, clock, pinger, reports_written, self._success)
        self.executions: dict[str, Execution] = {}
        """What holds a slot here, by `_id`: until the outcome is recorded, and the handler has really ended."""
        self._recording: set[Execution] = set()
        """Whose outcomes are on their way to the database."""
        self._successes = Successes(worker_id)
        self._threads = anyio.CapacityLimiter(1)
        self._processes: Processes | None = None
        self.started = 0
        self.finished = 0

    def free_slots(self, concurrency: int) -> int:
        """Return how many executions may begin now.

        Where there are many slots, a handler that has ended makes room though its outcome is still on its way to the
        database: so the next tasks are claimed meanwhile. But only half as many again may be on their way. Where there are
        few, each outcome is recorded before another task has its slot.
        """
        held = len(self.executions)
        at_work = held - len(self._recording)
        beside = concurrency // 2 if concurrency >= _MANY_SLOTS else 0
        return max(0, min(concurrency - at_work, concurrency + beside - held))

    # --- start and stop ---

    def start(self, document: Document, running_id: str, claim_sent: float) -> None:
        """Begin to execute a claimed task."""
        execution = Execution(document, running_id, self._worker_id, claim_sent, self._clock)
        execution.on_report = self._report
        execution.transactions = self._transactions
        execution.make_publication = self._make_publication
        self.executions[execution.id] = execution
        self.started += 1
        self._pinger.expect(execution.ping_every_s)
        execution.task = asyncio.get_running_loop().create_task(self._run(execution), name=f"task {execution.id}")

    def stop(self, execution: Execution, reason: Stop) -> None:
        """Make an execution stop; its handler is cancelled. The first reason stands."""
        if execution.ended or execution.stop_reason is not None:
            return
        execution.stop_reason = reason
        if reason is not Stop.TIMEOUT:
            logger.info(
                "stopping %s (%s): %s", execution.id, execution.running_id, reason.value, extra=fields_of(execution)
            )
        if execution.handler_running and execution.task is not None:
            execution.task.cancel()
            if reason is not Stop.WORKER_STOPS:
                asyncio.get_running_loop().call_later(_CANCELLED_ENDS_WITHIN_S, self._go_on_without, execution)

    def _go_on_without(self, execution: Execution) -> None:
        """Judge an execution whose handler goes on, though it was cancelled: as with a thread, its slot stays taken."""
        if not execution.ended:
            execution.handler_done = asyncio.Event()
            ending = ending_of(execution, asyncio.CancelledError())
            execution.judged = True
            execution.end()
            execution.concluding = asyncio.get_running_loop().create_task(self._finish(execution, ending))

    def lose(self, execution: Execution) -> None:
        """The lease is gone: whatever the handler still does counts no more."""
        if not execution.ended and execution.stop_reason is None:
            logger.warning(
                "lease lost: task %s, execution %s", execution.id, execution.running_id, extra=fields_of(execution)
            )
            self.stop(execution, Stop.LEASE_LOST)

    def cut_hook_short(self, execution: Execution) -> None:
        """Wait no longer for `after`: the worker ends, and there is an outcome to record."""
        if execution.hook_running and execution.pipeline is not None:
            execution.pipeline.cancel()

    # --- the pipeline ---

    async def _run(self, execution: Execution) -> None:
        ending = await self._handle(execution)
        if not execution.judged:
            await self._finish(execution, ending)
        elif execution.handler_done is not None:
            execution.handler_done.set()

    async def _handle(self, execution: Execution) -> Ending:
        """Run the handler, with what comes before it, and judge how it ended."""
        execution.span = process_span(execution)
        try:
            definition = self._definitions[execution.name]
            args, kwargs = definition.params.to_run(execution.document.get("params") or {})
            if self._before is not None or self._after is not None:
                execution.as_task = Task.from_document(execution.document)
            if self._before is not None:
                await self._call_before(execution, self._before(execution.as_task))
            value = await self._call(execution, definition, args, kwargs)
        except BaseException as error:  # noqa: BLE001 — whatever a handler raises ends its own execution and nothing else
            return ending_of(execution, error)
        return ending_with(execution, value)

    async def _finish(self, execution: Execution, ending: Ending) -> None:
        """Bring it to its outcome. It has one, whatever goes wrong here: else it would hold its slot and its lease for ever."""
        execution.judged = True
        execution.end()
        try:
            if self._after is not None and execution.as_task is not None:
                await self._call_after(execution, self._after, ending)
            if execution.span is not None:
                execution.span.end(ending)
            await self._conclude(execution, ending)
        except Exception as error:
            logger.exception("the end of task %s met an error that is not its handler's", execution.id)
            if not execution.recorded_or_lost:
                self._record(execution, failure(execution, failed_by(error)))

    async def _call_after(self, execution: Execution, after: AfterHook, ending: Ending) -> None:
        execution.hook_running = True
        try:
            await _maybe(after(execution.as_task, ending))
        except (Exception, asyncio.CancelledError):
            logger.exception("the hook 'after' failed for task %s", execution.id, extra=fields_of(execution))
        finally:
            execution.hook_running = False

    async def _call_before(self, execution: Execution, called: Awaitable[None] | None) -> None:
        """Wait for the hook, which a stop cancels as it does the handler."""
        execution.handler_running = True
        try:
            await _maybe(called)
        finally:
            execution.handler_running = False

    async def _call(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run the handler, within its time."""
        limit_ms = execution.stored_option.get("run_timeout_ms")
        timer = None
        if limit_ms is not None:
            timer = asyncio.get_running_loop().call_later(limit_ms / 1000, self.stop, execution, Stop.TIMEOUT)
        execution.handler_running = True
        if execution.stop_reason is not None:
            raise asyncio.CancelledError
        try:
            if definition.run == "async":
                enter(TaskContext(execution))
                self._tell_start(execution)
                return await definition.fn(*args, **kwargs)
            if definition.run == "thread":
                return await self._call_in_thread(execution, definition, args, kwargs)
            self._tell_start(execution)
            return await self._call_in_process(execution, definition, args, kwargs)
        finally:
            execution.handler_running = False
            if timer is not None:
                timer.cancel()

    def _tell_start(self, execution: Execution) -> None:
        if self._observer is not None:
            self._observer.started(execution.name, time.monotonic() - execution.started)

    async def _call_in_thread(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        loop = asyncio.get_running_loop()
        done = execution.handler_done = asyncio.Event()
        begun = threading.Lock()
        """Whoever has it decides: the thread that the handler runs, or a stop before that it never will."""

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

        # Each execution holds a slot of the consumer, so the slots are the limit; this one only has to be no tighter.
        self._threads.total_tokens = max(self._threads.total_tokens, len(self.executions) + 8)
        try:
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except BaseException:
            if begun.acquire(blocking=False):
                done.set()
            raise

    async def _call_in_process(
        self, execution: Execution, definition: TaskDefinition[Any, Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        # Imported here: few need it, and it is POSIX's alone.
        from taskmesh.consumer.conversation import Conversation  # noqa: PLC0415
        from taskmesh.consumer.processes import Processes  # noqa: PLC0415

        if self._processes is None:
            self._processes = Processes()
        return await Conversation(self._processes, execution, definition, args, kwargs).outcome()

    async def close(self) -> None:
        """End what was kept for the next execution."""
        self._successes.tell_rest()
        await self._transactions.close()
        if self._processes is not None:
            await self._processes.close()

    async def _conclude(self, execution: Execution, ending: Ending) -> None:
        """Turn the ending into an outcome and hand it to the finisher."""
        if self._observer is not None:
            self._observer.ended(execution.name, ending.kind, time.monotonic() - execution.started)
        if execution.recorded:
            self._successes.tell(execution)
            self._over(execution, "recorded")
            return
        if ending.kind == "succeeded":
            outcome = self._success(execution, ending.value)
        elif ending.kind == "failed":
            outcome = failure(execution, ending)
        elif ending.kind == "snoozed":
            outcome = snoozed(execution, ending)
        elif ending.kind == "released":
            outcome = execution.outcome("released", {})
        elif execution.stop_reason is Stop.CANCELLED:
            execution.recorded_or_lost = True
            await self._handler_end(execution)  # until then its entry shows that it is still on its way out
            outcome = stopped(execution)
        else:
            self._over(execution, "lost")
            return
        if outcome.kind == "succeeded" and execution.publications:
            await self._record_with_publications(execution, outcome)
            return
        self._record(execution, outcome)

    def _record(self, execution: Execution, outcome: Outcome) -> None:
        """Have the outcome recorded; the execution is over when it has its fate."""

        def over(fate: Fate) -> None:
            self._recording.discard(execution)
            if outcome.kind == "succeeded" and fate == "recorded":
                self._successes.tell(execution)
            self._over(execution, fate)

        if execution.handler_done is None or execution.handler_done.is_set():  # what goes on keeps its slot
            self._recording.add(execution)
            self._slot_freed()
        self._finisher.add(outcome, over)

    def _success(self, execution: Execution, value: Any) -> Outcome:
        try:
            entry, size = kept("returns", value, "result")
        except (Unstorable, TooLarge) as error:
            return failure(execution, Ending("failed", reason=unstorable_text(error)))
        return execution.outcome("succeeded", entry, size + 200)

    async def _record_with_publications(self, execution: Execution, outcome: Outcome) -> None:
        """Record SUCCESS and the tasks that the handler published as one."""
        try:
            await self._transactions.record(execution, outcome)
        except LeaseLost:
            self._over(execution, "lost")
        except Exception as error:  # noqa: BLE001 — what is published may be refused in any way
            self._record(execution, failure(execution, failed_by(error)))
        else:
            self._successes.tell(execution)
            self._over(execution, "recorded")

    def _over(self, execution: Execution, fate: Fate) -> None:
        """The outcome has its fate: free the slot, as soon as the handler has really ended."""
        execution.ended = True
        execution.recorded_or_lost = True
        if fate == "lost" and execution.stop_reason is None:
            logger.warning(
                "the outcome of task %s came too late: execution %s had lost its lease",
                execution.id,
                execution.running_id,
                extra=fields_of(execution),
            )
            # If that was since the task was cancelled meanwhile, its entry is to show that the handler has ended.
            self._finisher.add(stopped(execution), lambda _: None)
        if execution.handler_done is not None and not execution.handler_done.is_set():
            execution.concluding = asyncio.get_running_loop().create_task(self._wait_for_handler(execution))
        else:
            self._free(execution)

    async def _wait_for_handler(self, execution: Execution) -> None:
        await self._handler_end(execution)
        self._free(execution)

    async def _handler_end(self, execution: Execution) -> None:
        """Wait for the end of a handler that nothing can hasten."""
        if execution.handler_done is not None and not execution.handler_done.is_set():
            logger.warning(
                "the handler of task %s goes on, though its execution is over: its slot stays taken",
                execution.id,
                extra=fields_of(execution),
            )
            await execution.handler_done.wait()

    def _free(self, execution: Execution) -> None:
        if self.executions.get(execution.id) is execution:
            del self.executions[execution.id]
            self.finished += 1
            self._slot_freed()


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
