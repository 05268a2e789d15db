"""Whatever happens to tasks that wait for each other, and whoever dies before telling: what is left agrees with the rule.

The rule, by level: what is shut has a reason, what failed because of others has one that failed, what is waited for is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from taskmesh import TaskOption
from taskmesh.model.configuration import Configuration
from taskmesh.store import Store, control, schema
from taskmesh.store.claim import claim
from taskmesh.store.finish import Outcome, finish
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish
from taskmesh.store.relations import dependencies
from taskmesh.store.settle import settle
from tests.properties.patience import PatientStore

SEED = os.environ.get("SEED", "taskmesh")
_BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
_TASKS, _OPERATIONS = 12, 70
_UNFINISHED = ("INIT", "RUNNING")


class World:
    """Some tasks, each of which waits for some of those before it."""

    def __init__(self, store: Store, random: Random) -> None:
        self.store = store
        self.random = random
        self.keys = [f"job:{n}" for n in range(_TASKS)]
        self.claims = 0

    def pass_time(self, seconds: float) -> None:
        self.store.now += timedelta(seconds=seconds)

    async def publish(self, id_: str) -> None:
        place = self.keys.index(id_)
        there = {task["_id"] for task in await self.store.find({"status": {"$ne": "DELETED"}}, {"_id": 1})}
        before = [key for key in self.keys[:place] if key in there]
        after = self.random.sample(before, min(len(before), self.random.choice((0, 1, 2, 3))))
        configuration = Configuration(
            option=TaskOption(
                max_unexpected_retries=0, retain_success_ms=self.random.choice((0, 20_000)), retain_failed_ms=3_600_000
            )
        ).changed(
            after=[tuple(key.split(":")) for key in after],
            on_dependency_failure=self.random.choice(("fail", "fail", "wait", "run")),
            expire_time=self.store.now + timedelta(seconds=30) if self.random.random() < 0.1 else None,
        )
        await publish(self.store, [Publication("job", id_.split(":")[1], {}, configuration)], self.store.now)
        await dependencies.tell(self.store, [id_])

    async def run(self, id_: str) -> None:
        self.claims += 1
        if await claim(self.store, [id_], "w", f"r{self.claims}", deadline_ms=60_000):
            entry, kind = (
                {"fail_reason": "no", "retry_jitter": 0.0},
                self.random.choice(("succeeded",) * 3 + ("failed",)),
            )
            outcome = Outcome(id_, f"r{self.claims}", kind, entry if kind == "failed" else {})  # type: ignore[arg-type]
            await finish(self.store, "w", [outcome], deadline_ms=60_000)
            await dependencies.tell(self.store, [id_])

    async def cancel(self, id_: str) -> None:
        await control.cancel(self.store, id_)

    async def retry(self, id_: str) -> None:
        await control.retry(self.store, id_)

    async def delete(self, id_: str) -> None:
        await control.delete(self.store, id_)

    async def settled(self) -> None:
        """Let others find what was left undone, and the TTL monitor what is over."""
        for _ in range(2 * _TASKS):
            self.pass_time(1.5)
            settled = await settle(self.store)
            if not await dependencies.sweep(self.store, 0 if settled else dependencies.MARKS_FOUND_AFTER_MS):
                break
        await self.store.driver.collection(self.store.tasks).delete_many({"delete_time": {"$lte": self.store.now}})

    async def broken(self) -> list[str]:
        tasks = {task["_id"]: task for task in await self.store.find({}, {"params": 0})}
        return [f"{id_}: {what}" for id_ in tasks for what in _broken(id_, tasks)]


def _broken(id_: str, tasks: dict[str, Any]) -> Iterator[str]:
    task, state = tasks[id_], tasks[id_]["task_state"]
    finished = task["status"] not in _UNFINISHED
    after = [tasks.get(other) for other in state.get("after", {}).get("ids", ())]
    naming = [other["task_state"] for other in tasks.values() if id_ in other["task_state"].get("dependents", ())]
    pending = [other for other in naming if other.get("pending")]
    # One that was deleted, and published again since, is another task: nobody waits for that.
    ended_badly = [
        other
        for other in after
        if other is None
        or other["status"] not in (*_UNFINISHED, "SUCCESS")
        or id_ not in other["task_state"].get("dependents", ())
    ]
    unfinished = [
        each for each in state.get("dependents", ()) if each in tasks and tasks[each]["status"] in _UNFINISHED
    ]
    if state.get("pending", False) != (bool(state.get("dependents")) and not finished):
        yield "pending does not say whether it is"
    if "unlinked" in state and not finished:
        yield "it was never linked with what it waits for"
    if task["status"] == "INIT" and "waits_for" in state:
        if state["waits_for"] == "fail" and ended_badly:
            yield f"it waits, though {ended_badly} ended badly"
        if not pending and (state["waits_for"] == "run" or not ended_badly):
            yield "it waits for nothing"
        if "next_claim_time" in task:
            yield "it waits, and can be claimed"
    if "dependency_failure" in state and not finished:
        yield "it has failed, and is not finished"
    if (
        finished
        and unfinished
        and task["status"] != "DELETED"
        and "delete_time" in task
        and "released_time" not in state
    ):
        yield f"it goes, though {unfinished} need it"
    if task["status"] == "DELETED":
        yield "it was deleted, and everybody told, and it is there"


@pytest.mark.blocks_the_loop  # it does not, but the guard looks at the stack at every call, and doubles the time
@pytest.mark.parametrize("run", range(3))
async def test_what_is_left_agrees_with_the_rule(
    mongo_uri: str, database: str, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(f"{SEED}/{run}")
    store = PatientStore(mongo_uri, database, now=_BEGIN)
    tell, kinds = dependencies.tell, ("run", "run", "run", "publish", "publish", "retry", "cancel", "delete")
    seen: set[str] = set()

    async def tell_or_die(store: Store, ids: Any) -> None:
        if random.random() < 0.5:
            await tell(store, ids)

    try:
        await schema.create_indexes(store)
        world = World(store, random)
        for id_ in world.keys:
            await world.publish(id_)
        for number in range(_OPERATIONS):
            kind, id_ = random.choice(kinds), random.choice(world.keys)
            world.pass_time(0.1)
            with monkeypatch.context() as patch:
                patch.setattr(dependencies, "tell", tell_or_die)
                await getattr(world, kind)(id_)
            await world.settled()
            assert await world.broken() == [], f"SEED={SEED}, run {run}, after {number}: {kind} {id_}"
            seen |= {task["status"] for task in await store.find({}, {"status": 1})}
    finally:
        await store.close()
    assert {"INIT", "SUCCESS", "FAIL"} <= seen
