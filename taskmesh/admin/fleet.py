"""What a mesh can do with the fleet: pause and limit queues, steer workers, and tell how all of it is."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskmesh.admin.doctor import Finding, examine
from taskmesh.admin.error_groups import ErrorReport, read_errors
from taskmesh.admin.queues import COUNTED_TO, checked_limits, read_queues, set_group_limit
from taskmesh.admin.stats import Stats, read_stats
from taskmesh.admin.what_if import LimitEffect, effect_of_limit
from taskmesh.client.connection import Connected
from taskmesh.client.definition import checked_queue, checked_time
from taskmesh.consumer.settings import checked_concurrency
from taskmesh.model.errors import InvalidOption, TaskNotFound
from taskmesh.model.ids import checked_group, checked_remark, checked_worker_id
from taskmesh.model.queue import QueueInfo, QueueLimits
from taskmesh.model.task import checked_name
from taskmesh.model.worker import WorkerInfo
from taskmesh.store import limits, registry


class FleetActions(Connected):
    """The part of `TaskMesh` that is about queues and workers."""

    async def pause(
        self, queue: str, *, reason: str | None = None, by: str | None = None, until: datetime | None = None
    ) -> None:
        """Let no worker claim from this queue any more, until `resume`, or the time `until`. What runs, runs on."""
        settings = {
            "paused": True,
            "paused_reason": checked_remark("reason", reason),
            "paused_by": checked_remark("by", by),
            "paused_until": None if until is None else checked_time("until", until),
            "pause_time": self.clock.now(),
        }
        await registry.set_queue(self.store, checked_queue(queue), settings)
        await self._queues_changed()

    async def resume(self, queue: str) -> None:
        """Let workers claim from this queue again."""
        await registry.set_queue(self.store, checked_queue(queue), {"paused": False, "paused_until": None})
        await self._queues_changed()

    async def set_limit(
        self,
        queue: str,
        *,
        rate: int | None = None,
        per_ms: int | None = None,
        running: int | None = None,
        group_running: int | None = None,
    ) -> None:
        """Limit a queue, over the whole fleet; what is not given here is not limited (any more).

        At most `rate` starts in any `per_ms` (1000 by default); at most `running` executions at a time; at most
        `group_running` of each group (`configure(group=…)`) at a time: tasks of a full group hold up nobody else. What
        runs already runs on, and is counted. Consumers of this mesh know of it when this returns, other processes a moment
        later: at once if they listen, within two seconds if they only scan. Raises `InvalidOption`.
        """
        limited = checked_limits(rate=rate, per_ms=per_ms, running=running, group_running=group_running)
        await limits.set_limits(self.store, checked_queue(queue), limited)
        await self._queues_changed()

    async def set_group_limit(self, queue: str, group: str, running: int | None) -> None:
        """Let this one group of a queue run `running` executions at a time; None: as many as every other group."""
        await set_group_limit(self.store, checked_queue(queue), group, running)
        await self._queues_changed()

    async def what_if_limit(
        self,
        queue: str,
        *,
        rate: int | None = None,
        per_ms: int | None = None,
        running: int | None = None,
        group_running: int | None = None,
    ) -> LimitEffect:
        """Tell what `set_limit` with these arguments would do: how many could start now, and then. Changes nothing."""
        limited = checked_limits(rate=rate, per_ms=per_ms, running=running, group_running=group_running)
        return await effect_of_limit(self.store, checked_queue(queue), lambda now: now.model_copy(update=limited))

    async def what_if_group_limit(self, queue: str, group: str, running: int | None) -> LimitEffect:
        """Tell likewise what `set_group_limit` would do."""
        checked_limits(rate=None, per_ms=None, running=running, group_running=None)
        own = {checked_group(group): running}

        def changed(now: QueueLimits) -> QueueLimits:
            groups = {name: limit for name, limit in (now.groups | own).items() if limit is not None}
            return now.model_copy(update={"groups": groups})

        return await effect_of_limit(self.store, checked_queue(queue), changed)

    async def _queues_changed(self) -> None:
        """Let our own consumers know before the caller goes on; the others hear of it by their streams."""
        for consumer in tuple(self._consumers):
            await consumer.read_queues()

    async def queues(self, *, counted_to: int = COUNTED_TO) -> list[QueueInfo]:
        """Return the queues that have settings or unfinished tasks, with their pauses and limits.

        `counted_to`: how far to count the tasks that wait in each.
        """
        return await read_queues(self.store, counted_to=counted_to)

    async def workers(self) -> list[WorkerInfo]:
        """Return the live workers and those that went within the last hour."""
        _ = self.store
        return await self._registry.read()

    async def stop_worker(self, worker_id: str, grace_ms: int = 30_000) -> None:
        """Let a consumer elsewhere stop gracefully. Raises `TaskNotFound` if no such worker is registered, `InvalidOption`."""
        if isinstance(grace_ms, bool) or not isinstance(grace_ms, int) or grace_ms < 0:
            raise InvalidOption(f"grace_ms is a number of milliseconds, 0 or more, not {grace_ms!r}")
        await self._order(worker_id, {"stop_grace_ms": grace_ms})

    async def pause_worker(self, worker_id: str) -> None:
        """Let a consumer elsewhere claim no more; what it runs, runs on."""
        await self._order(worker_id, {"paused": True})

    async def resume_worker(self, worker_id: str) -> None:
        """Let a paused consumer elsewhere go on."""
        await self._order(worker_id, {"paused": False})

    async def set_concurrency(self, worker_id: str, concurrency: int) -> None:
        """Change how many executions a consumer elsewhere runs at once. Raises `TaskNotFound`, `InvalidOption`."""
        await self._order(worker_id, {"concurrency": checked_concurrency(concurrency)})

    async def _order(self, worker_id: str, changes: dict[str, Any]) -> None:
        if not await registry.order(self.store, checked_worker_id(worker_id), changes):
            raise TaskNotFound(f"no worker {worker_id!r} is registered: `taskmesh workers` lists those that are")

    async def stats(self) -> Stats:
        """Return counts by name and status, the lag of the oldest claimable task, and the throughput of the fleet."""
        return await read_stats(self.store)

    async def doctor(self) -> list[Finding]:
        """Look for what is wrong with the server, the collection, the fleet and the tasks. Changes nothing."""
        return await examine(self.store)

    async def errors(self, name: str | None = None, *, at_most: int = 10_000, deadline_ms: int = 10_000) -> ErrorReport:
        """Return what fails and why: failures grouped by task name, type of error and place, the most frequent first.

        Looks at `at_most` tasks, the same share of each name and queue (20 at least), and stops at the deadline: the
        report says whether these were all.
        """
        return await read_errors(self.store, None if name is None else checked_name(name), at_most, deadline_ms)
