"""Batches: executions of one definition that share a call of its handler (`@mesh.task(batch=100)`).

Each task is an execution like any other, with its own lease, slot, hooks and outcome, up to the point where its handler would
be called: there it joins the open batch. The call starts when the batch is full, or when its first task has waited for
`batch_wait_ms`. What the call returns is distributed among the members. A member that is told to stop leaves the batch, and the
call goes on for the others; its slot stays occupied until the call is over, since the call may still be working on its item.
When all members have left, the call is cancelled.

If the process dies, the leases run out, and each task runs again.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from taskmesh.client.batch import values_of
from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.run.context import BlockingTaskContext, TaskContext, enter_batch
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.stop_reasons import Stop
from taskmesh.consumer.settings import Settings


class Member:
    """An execution in a batch."""

    def __init__(
        self, execution: Execution, item: Any, outcome: asyncio.Future[tuple[Any, BaseException | None]]
    ) -> None:
        self.execution = execution
        self.item = item
        self.outcome = outcome
        self.gone = False
        """Whether the execution was told to stop, and has left the batch."""

    @property
    def stays(self) -> bool:
        """Whether somebody still waits for this member's value."""
        return not self.gone and self.execution.stop_reason is None


class Batch:
    """Executions that share one call."""

    def __init__(self, definition: TaskDefinition[Any, Any], timer: asyncio.TimerHandle) -> None:
        self.definition = definition
        self.timer = timer
        self.members: list[Member] = []
        self.call: asyncio.Task[None] | None = None
        """None until the call starts."""
        self.over = asyncio.Event()


class Batches:
    """The batches of one consumer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._open: dict[TaskDefinition[Any, Any], Batch] = {}

    async def value_of(self, execution: Execution, definition: TaskDefinition[Any, Any], item: Any) -> Any:
        """Join a batch. Return or raise what the call says about this task."""
        execution.batched = True
        execution.run_time.stand_still()  # until the call begins
        batch = self._joined(definition)
        member = Member(execution, item, self._loop.create_future())
        batch.members.append(member)
        if len(batch.members) >= min(definition.batch, self._settings.concurrency):
            self._begin(batch)
        try:
            value, error = await member.outcome
        except asyncio.CancelledError:
            await self._leave(batch, member)
            raise
        if error is not None:
            raise error
        return value

    def _joined(self, definition: TaskDefinition[Any, Any]) -> Batch:
        batch = self._open.get(definition)
        if batch is None:
            timer = self._loop.call_later(definition.batch_wait_ms / 1000, self._begin_what_is_open, definition)
            batch = self._open[definition] = Batch(definition, timer)
        return batch

    def _begin_what_is_open(self, definition: TaskDefinition[Any, Any]) -> None:
        self._begin(self._open[definition])

    def _begin(self, batch: Batch) -> None:
        batch.timer.cancel()
        del self._open[batch.definition]
        if batch.members:
            for member in batch.members:
                member.execution.run_time.go_on(partial(member.execution.stop, Stop.TIMEOUT))
            # A context of its own: the call does not belong to any single task.
            batch.call = self._loop.create_task(
                self._call(batch), name=f"batch of {batch.definition.name}", context=self._context.copy()
            )

    async def _leave(self, batch: Batch, member: Member) -> None:
        """Leave the batch, since this member was told to stop. If no member stays, cancel the call and wait for its end."""
        member.gone = True
        if batch.call is None:
            batch.members.remove(member)
            return
        if batch.definition.run == "async" and not any(each.stays for each in batch.members):
            batch.call.cancel()
            try:
                await batch.over.wait()
            except asyncio.CancelledError:
                member.execution.handler_done = batch.over
                raise
        elif not batch.over.is_set():
            member.execution.handler_done = batch.over

    async def _call(self, batch: Batch) -> None:
        """Call the handler, and hand each member its result.

        Raises nothing: whatever ends the call is the outcome of its members.
        """
        values: Sequence[Any] = ()
        error: BaseException | None = None
        try:
            values = values_of(batch.definition.name, await self._returned(batch), len(batch.members))
        except BaseException as raised:  # noqa: BLE001 — SystemExit too ends its own tasks and nothing else
            error = raised
        batch.over.set()
        for i, member in enumerate(batch.members):
            if not member.outcome.done():
                value = None if error is not None else values[i]
                failed = error or (value if isinstance(value, BaseException) else None)
                member.outcome.set_result((None if failed is not None else value, failed))

    async def _returned(self, batch: Batch) -> Any:
        definition, executions = batch.definition, [member.execution for member in batch.members]
        items = [member.item for member in batch.members]
        if definition.run == "async":
            enter_batch([TaskContext(execution) for execution in executions])
            return await definition.fn(items)

        def call() -> Any:
            enter_batch([BlockingTaskContext(execution) for execution in executions])
            try:
                return definition.fn(items)
            except StopIteration as error:  # it cannot be raised through a future
                raise RuntimeError("the handler raised StopIteration") from error

        # No limit of its own is needed: each execution holds a slot of the consumer.
        return await anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1))
