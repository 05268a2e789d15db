"""A handle to a published task: to wait for it, and to ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

from taskmesh.client.returns import PLAIN, Returns
from taskmesh.client.tasks import UNSAID, Tasks
from taskmesh.model.errors import TaskCancelled, TaskError, TaskExpired, TaskNotFound
from taskmesh.model.flow import FlowStatus
from taskmesh.model.task import Status, Task

R = TypeVar("R")


class TaskHandle(Generic[R]):
    """A published task, to wait for and to ask about."""

    def __init__(
        self,
        tasks: Tasks,
        name: str,
        key: str,
        *,
        created: bool = False,
        updated: bool = False,
        warnings: Sequence[str] = (),
        returns: Returns = PLAIN,
        not_before: float | None = None,
    ) -> None:
        """`name` and `key` are valid ones. `not_before`: when the task did not exist yet (monotonic). None if that is unknown."""
        self.tasks = tasks
        self.name = name
        self.key = key
        self.created = created
        """True: inserted now. False: the key existed already."""
        self._is_due_a_result = created or updated
        """Whether nobody has read the result of what this handle published."""
        self.updated = updated
        """Whether an existing task was changed."""
        self._warnings = warnings
        self._returns = returns
        self._not_before = not_before

    @property
    def warnings(self) -> list[str]:
        """Why no worker could run the task when it was published, by what was known of workers and queues two seconds before."""
        return list(self._warnings)

    def is_published(self, *, created: bool) -> None:
        """Note that the flow of which it is a member was published."""
        self.created = self._is_due_a_result = created

    async def flow(self) -> FlowStatus:
        """Return the state of the flow of which the task is a member (of several, the newest). Raises `TaskNotFound`."""
        return await self.tasks.flows.of(self.name, self.key)

    async def task(self) -> Task:
        """Return the task as it stands now. Raises `TaskNotFound`."""
        return await self.tasks.get(self.name, self.key)

    async def status(self) -> Status:
        """Return where the task stands now. Raises `TaskNotFound`."""
        return (await self.task()).status

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the task to finish, and return the value of its first SUCCESS.

        The value has the type that the handler is annotated to return, if the publishing mesh knows the handler; otherwise it
        consists of plain values. `timeout` in seconds; None waits for ever, 0 looks once. Raises `TaskError` (with `reasons`),
        `TaskCancelled`, `TaskExpired`, `TaskNotFound` (deleted meanwhile), `TimeoutError`, or `UnstorableValue` if the
        annotation has changed so that the stored value does not fit it.
        """
        return self._value(await self._finished(timeout), 0)

    async def results(self, timeout: float | None = None) -> dict[str, R]:
        """Wait for the task to finish, and return the value of every worker that ran it to SUCCESS. Raises as `result` does."""
        task = await self._finished(timeout)
        return {entry.worker_id: self._value(task, place) for place, entry in enumerate(task.successes)}

    async def signal(self, event: str, payload: Any = UNSAID, *, signal_id: str | None = None) -> None:
        """Tell the task that something has happened, for its handler's `wait_for(event)`. See `TaskMesh.signal`."""
        await self.tasks.signal(self.name, self.key, event, payload, signal_id=signal_id)

    async def cancel(self) -> Task:
        """Cancel the task. A finished one stays as it is. Return it as it stands after that."""
        return await self.tasks.cancel(self.name, self.key)

    def read(self, stored: Any) -> R:
        """Return a stored result in the type that the handler is annotated to return. Raises `UnstorableValue`."""
        return cast(R, self._returns.read(stored))

    def _value(self, task: Task, place: int) -> R:
        return cast(R, self._returns.of_queue(task.queue).read(task.successes[place].returns))

    async def _finished(self, timeout: float | None) -> Task:
        task = await self.tasks.finished(
            self.name, self.key, timeout, published=self._is_due_a_result, not_before=self._not_before
        )
        self._is_due_a_result = False
        self._not_before = None
        label = f"task {self.name!r} {self.key!r}"
        if task.status is Status.FAIL:
            raise TaskError(
                f"{label} failed: {'; '.join(task.fail_reasons) or 'no reason was recorded'}", task.fail_reasons
            )
        if task.status is Status.CANCELLED:
            raise TaskCancelled(f"{label} was cancelled at {task.task_state.cancel_time}")
        if task.status is Status.EXPIRED:
            raise TaskExpired(f"{label} had not succeeded by {task.task_state.expire_time}, its expire_time")
        if not task.successes:
            raise TaskNotFound(f"{label} has no result (any more)")
        return task

    def __repr__(self) -> str:
        return f"<TaskHandle {self.name!r} {self.key!r} created={self.created} updated={self.updated}>"
