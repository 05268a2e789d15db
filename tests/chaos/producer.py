"""A process that publishes a seeded mixture of tasks until it is told to stop: `python -m tests.chaos.producer '{…}'`.

It notes every publish that it tries, and what it was told, in a file of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh import TaskMesh, TaskMeshError
from tests.chaos.handlers import Kinds, define
from tests.chaos.history import Asked, Published
from tests.chaos.process_handlers import ENDS
from tests.processes.broken import BROKEN
from tests.processes.sabotage import replace
from tests.processes.worker import die_with_parent

PAUSED_AT_TIMES = "paused-at-times"
"""A queue that one of the faults pauses."""
RATED, RATE, PER_MS = "rated", 60, 60_000
"""A queue with a long window. Bookings that the killed leave behind count as used, so it has room for twice its tasks."""
_TO_BE_REPLACED_MS = 20_000
"""By then it has been deleted, or could not be and runs after all."""
_TRIES = 200
_ANY_END = ("SUCCESS", "CANCELLED", "EXPIRED")
_SHARES = {
    "work": 30,
    "shared": 8,
    "pinned": 5,
    "paused": 4,
    "rated": 3,
    "delayed": 6,
    "expiring": 5,
    "cancelled": 5,
    "cleans": 6,
    "replaced": 4,
    "in_thread": 5,
    "flaky": 8,
    "doomed": 4,
    "snoozes": 5,
    "retries": 4,
    "reports": 5,
    "chains": 5,
    "writes": 6,
    "transfers": 8,
    "refreshes": 6,
    "after": 6,
    "flow": 3,
    "obeys": 5,
    "obeys_in_thread": 5,
    "closes": 2,
    "in_process": 4,
    "writes_in_process": 2,
    "blocks": 1,
    "deadly": 1,
}


@dataclass
class Order:
    """What a producer is told by its command line."""

    uri: str
    database: str
    directory: str
    number: int
    seed: int
    per_s: float
    worker_ids: Sequence[str]
    broken: Sequence[str] = ()


class Producer:
    """Publishes, and notes what came of it."""

    def __init__(self, order: Order, mesh: TaskMesh, kinds: Kinds) -> None:
        self._order, self._mesh, self._kinds = order, mesh, kinds
        self._chance = random.Random(f"{order.seed}:{order.number}")
        path = Path(order.directory) / f"{order.number}.published"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.count = 0

    async def publish_one(self) -> None:  # noqa: C901, PLR0912 -- a branch for each kind
        """Publish the next task, and perhaps cancel it."""
        self.count += 1
        if self.count % 50 == 0:  # a key that every producer publishes
            await self._publish(self._kinds.work, f"everybodys-{self.count}", {"ms": 5})
            return
        kind = self._chance.choices(list(_SHARES), list(_SHARES.values()))[0]
        if kind in ("after", "flow"):
            await (self._publish_after if kind == "after" else self._publish_flow)(
                f"{kind}-{self._order.number}-{self.count}"
            )
            return
        definition: Any = getattr(self._kinds, kind, self._kinds.work)
        key, ms = f"{kind}-{self._order.number}-{self.count}", self._chance.randrange(0, 200)
        params: dict[str, Any] = {"ms": ms}
        ends: tuple[str, ...] = ("SUCCESS",)
        if kind == "shared":
            definition = definition.configure(concurrent_worker_cnt=self._chance.choice((2, 3)))
        elif kind == "pinned":
            definition = definition.configure(specific_worker_ids=self._chance.sample(self._order.worker_ids, 2))
        elif kind == "paused":
            definition = definition.configure(queue=PAUSED_AT_TIMES)
        elif kind == "rated":
            definition = definition.configure(queue=RATED)
        elif kind == "delayed":
            definition = definition.configure(delay_ms=self._chance.randrange(0, 4_000))
        elif kind == "expiring":
            soon = self._mesh.clock.now() + timedelta(milliseconds=self._chance.randrange(100, 3_000))
            definition, ends = definition.configure(expire_time=soon), ("SUCCESS", "EXPIRED")
        elif kind == "cleans":
            params, ends = {"ms": self._chance.randrange(1_000, 3_000)}, ("SUCCESS", "CANCELLED")
        elif kind == "cancelled":
            params, ends = {"ms": self._chance.randrange(0, 1_000)}, ("SUCCESS", "CANCELLED")
        elif kind == "replaced":
            definition = definition.configure(delay_ms=_TO_BE_REPLACED_MS)
        elif kind == "doomed":
            ends = ("FAIL",)
        elif kind in ("blocks", "obeys", "obeys_in_thread", "writes_in_process"):
            params = {"ms": self._chance.randrange(200, 1_500)}
        elif kind == "in_process":
            then = self._chance.choice(ENDS)
            params = {"ms": self._chance.randrange(200, 3_000), "polls": self._chance.random() < 0.5, "then": then}
        elif kind in ("snoozes", "retries", "refreshes", "deadly"):
            params = {}
        if kind == "writes_in_process":
            params["database"] = self._order.database
        await self._publish(definition, key, params, ends)
        if kind == "cancelled":
            await asyncio.sleep(self._chance.random() * 0.5)
            await self._ask("cancelled", self._mesh.cancel, key)
        elif kind == "cleans":
            await asyncio.sleep(self._chance.random())
            await self._begin_anew(key, params)
        elif kind == "replaced":
            await asyncio.gather(self._ask("deleted", self._mesh.delete, key), self._publish_anew(key, params))

    async def _publish_after(self, key: str) -> None:
        """Publish some tasks, and one that waits for them; again until it is told that it is there."""
        parts = [f"{key}-{n}" for n in range(self._chance.randrange(1, 4))]
        for part in parts:
            await self._until_told(self._kinds.work, part, {"ms": self._chance.randrange(0, 400)})
        await self._until_told(self._kinds.joins.configure(after=[("work", part) for part in parts]), key, {})

    async def _until_told(self, definition: Any, key: str, params: dict[str, Any]) -> None:
        while await self._publish(definition, key, params) is None:  # noqa: ASYNC110 -- the database has no event for it
            await asyncio.sleep(0.2)

    async def _publish_flow(self, key: str) -> None:
        """Publish a flow of some parts and two that come after; again, until it is told that it is there."""
        work, joins, ms = self._kinds.work, self._kinds.joins, self._chance.randrange(0, 400)
        while True:
            members: list[Any] = []
            try:
                async with self._mesh.flow(key) as flow:
                    members += [flow.add(work, f"{key}-{n}", ms=ms) for n in range(3)]
                    members.append(flow.add(joins, f"{key}-all", after=members[:3]))
                    members.append(flow.add(joins, f"{key}-end", after=[members[0], members[3]]))
            except (PyMongoError, TaskMeshError) as error:
                self._note(error=type(error).__name__)
            else:
                for member in members:
                    self._note(id=f"{member.name}:{member.key}", created=member.created, ends=("SUCCESS",))
                return
            for member in members:
                self._note(id=f"{member.name}:{member.key}", created=None, ends=("SUCCESS",))
            await asyncio.sleep(0.2)

    async def _begin_anew(self, key: str, params: dict[str, Any]) -> None:
        """Stop the handler, and let the task begin anew while it cleans up. Cut off in between, the task stays stopped."""
        mesh, cleans = self._mesh, self._kinds.cleans
        way = self._chance.choice(("retry", "run again", "publish", "exclude"))
        try:
            if way == "exclude":
                await mesh.set_option("cleans", key, specific_worker_ids=(self._chance.choice(self._order.worker_ids),))
            elif way == "publish":
                await mesh.delete("cleans", key)
                await self._publish(cleans, key, params, ("SUCCESS", "CANCELLED"))
            else:
                await mesh.cancel("cleans", key)
                await (
                    mesh.retry("cleans", key)
                    if way == "retry"
                    else cleans.configure(run_again=True).publish(key, **params)
                )
        except (PyMongoError, TaskMeshError) as error:
            self._note(error=type(error).__name__)

    async def _ask(self, kind: str, verb: Callable[[str, str], Awaitable[Any]], key: str) -> None:
        self._note(asked=f"work:{key}", kind=kind)
        try:
            await verb("work", key)
        except (PyMongoError, TaskMeshError) as error:
            self._note(error=type(error).__name__)

    async def _publish_anew(self, key: str, params: dict[str, Any]) -> None:
        """Publish until it is a new task, or an error comes: while its deletion is under way, and may be repeated."""
        for _ in range(_TRIES):
            if await self._publish(self._kinds.work, key, params) is not False:
                return
            await asyncio.sleep(0.02)

    async def _publish(
        self, definition: Any, key: str, params: dict[str, Any], ends: tuple[str, ...] = ("SUCCESS",)
    ) -> bool | None:
        created = None
        try:
            created = (await definition.publish(key, **params)).created
        except (PyMongoError, TaskMeshError) as error:
            self._note(error=type(error).__name__)
        self._note(id=f"{definition.name}:{key}", created=created, ends=ends)
        return created

    def _note(self, **facts: Any) -> None:
        os.write(self._file, (json.dumps(facts) + "\n").encode())


def read_notes(directory: Path) -> tuple[list[Published], list[Asked]]:
    """Return what all producers have published, and what else they have asked for."""
    lines = [
        json.loads(line) for path in sorted(directory.glob("*.published")) for line in path.read_bytes().splitlines()
    ]
    published = [Published(line["id"], line["created"], tuple(line["ends"])) for line in lines if "id" in line]
    return published, [Asked(line["asked"], line["kind"]) for line in lines if "asked" in line]


async def _produce(order: Order) -> None:
    for part in order.broken:
        BROKEN[part](replace)
    mesh = TaskMesh(order.uri, database=order.database)
    kinds = define(mesh)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with mesh:
        producer = Producer(order, mesh, kinds)
        busy: set[asyncio.Task[None]] = set()
        while not stopped.is_set():
            if len(busy) < 200:  # while the database is away, wait for it
                publishing = asyncio.create_task(producer.publish_one())
                busy.add(publishing)
                publishing.add_done_callback(busy.discard)
            await asyncio.sleep(1 / order.per_s)
        await asyncio.gather(*busy)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_produce(Order(**json.loads(sys.argv[1]))))
