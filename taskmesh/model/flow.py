"""A flow: tasks that were published as a whole, and how far they have come."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import PrivateAttr

from taskmesh.model.read_only import ReadOnly

TaskName = tuple[str, str]
"""A task's name and key."""


class FlowActions(Protocol):
    """What acts on flows."""

    # ruff: noqa: D102 — documented at `FlowStatus`

    async def result(self, key: str, timeout: float | None) -> dict[TaskName, Any]: ...
    async def cancel(self, key: str) -> FlowStatus: ...
    async def retry(self, key: str) -> FlowStatus: ...


class FlowTask(ReadOnly):
    """A member of a flow, when the flow was read."""

    name: str
    key: str
    status: str | None = None
    """None: it no longer exists."""


class FlowStatus(ReadOnly):
    """A flow when it was read."""

    key: str
    counts: dict[str, int]
    """Members by status. `GONE` are those that were deleted, or are past their retention."""
    progress: float
    """The share of the members that are finished, from 0 to 1; 1 for a flow without any."""
    tasks: list[FlowTask] = []
    """The members, in the order in which they were added."""
    edges: list[tuple[TaskName, TaskName]] = []
    """Which task comes before which: (name, key) of a dependency, and of its dependent."""
    published: bool = True
    """Whether it was published completely. If not, publish it again: that continues where it stopped."""
    _actions: FlowActions | None = PrivateAttr(None)

    @property
    def finished(self) -> bool:
        """Whether all its members are finished."""
        return self.progress >= 1

    @property
    def last(self) -> list[TaskName]:
        """The members that nothing comes after."""
        before = {first for first, _ in self.edges}
        return [(task.name, task.key) for task in self.tasks if (task.name, task.key) not in before]

    async def result(self, timeout: float | None = None) -> dict[TaskName, Any]:
        """Wait for the members that nothing comes after, and return their results by `(name, key)`.

        `timeout` in seconds. Raises as `TaskHandle.result` does, for the first of them that did not end as SUCCESS.
        """
        return await self._on().result(self.key, timeout)

    async def cancel(self) -> FlowStatus:
        """Cancel the members that are not finished. Return the flow as it stands after that."""
        return await self._on().cancel(self.key)

    async def retry(self) -> FlowStatus:
        """Restart the members that did not end as SUCCESS, and no others. Return the flow as it stands after that."""
        return await self._on().retry(self.key)

    def _on(self) -> FlowActions:
        if self._actions is None:
            raise RuntimeError("this FlowStatus was made by hand: ask mesh.flow_status(key) for one that can act")
        return self._actions

    def with_actions(self, actions: FlowActions) -> FlowStatus:
        """Return it with the ability to act."""
        self._actions = actions
        return self
