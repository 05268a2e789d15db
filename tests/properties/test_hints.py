"""The change stream's filter is implied by the claim rule (T11): a write that opens a task is announced.

It opens a task if nobody could claim it before, and somebody can now. A write that lets one worker more claim what others
could have claimed all the time changes nothing that the stream could tell by; that worker's next scan finds it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from random import Random

from taskmesh.model.configuration import Configuration
from taskmesh.store import Store, control, schema
from taskmesh.store.change_stream import Interest, change_from, open_stream
from taskmesh.store.finish import Kind, Outcome, finish, report
from taskmesh.store.publication import Publication
from taskmesh.store.publish import publish
from taskmesh.store.settle import settle
from tests.chaos.reading import ANYBODY_ELSE
from tests.properties.documents import Documents
from tests.properties.oracle import Document, Oracle
from tests.properties.world import WORKERS

SEED = os.environ.get("SEED", "taskmesh")
_COUNT = 600


class Writer:
    """Does something to each task, whatever comes to mind."""

    def __init__(self, store: Store, random: Random) -> None:
        self.store = store
        self.random = random

    async def touch(self, id_: str, oracle: Oracle) -> str:
        """Do something to a task, and return what."""
        held = oracle.live(self.store.now)
        if held and oracle.document["status"] == "RUNNING" and self.random.random() < 0.7:
            return await self._end(id_, self.random.choice(held))
        verb = self.random.choice(
            ("retry", "cancel", "set_option", "update", "clean_failed", "clean_success", "run_again")
        )
        if verb == "retry":
            await control.retry(self.store, id_)
        elif verb == "cancel":
            await control.cancel(self.store, id_)
        elif verb == "set_option":
            changes: Document = self.random.choice(
                (
                    {"specific_worker_ids": []},
                    {"specific_worker_ids": ["w2"]},
                    {"concurrent_worker_cnt": 3},
                    {"max_unexpected_retries": 9},
                    {"max_timeouts": 9},
                    {"unexpected_retry_delay_ms": 0},
                )
            )
            await control.set_option(self.store, id_, changes, {})
            verb += f" {changes}"
        else:
            tuned = self.random.choice(({}, {"specific_worker_ids": ["w2"]}, {"concurrent_worker_cnt": 3}))
            configuration = Configuration("even", tuned=tuned, start_time=self.store.now)
            asked = configuration.changed(**{{"update": "update_existing_params"}.get(verb, verb): True})
            await publish(self.store, [Publication("job", id_.partition(":")[2], {"n": 1}, asked)], self.store.now)
            verb += f" {tuned}"
        return verb

    async def _end(self, id_: str, entry: Document) -> str:
        kinds: tuple[Kind, ...] = ("succeeded", "failed", "released", "snoozed")
        kind = self.random.choice((*kinds, None))
        outcome = Outcome(id_, entry["running_id"], kind or "succeeded", {}, delay_ms=0 if kind == "snoozed" else None)
        if kind is None:
            await report(self.store, entry["worker_id"], [outcome])
        else:
            await finish(self.store, entry["worker_id"], [outcome])
        return kind or "report"


async def test_t11_a_write_that_makes_a_task_claimable_is_announced(mongo_uri: str, database: str) -> None:
    """On the real clock, stopped: the stream's filter compares with the time of the write."""
    now = datetime.now(UTC)
    now = now.replace(microsecond=now.microsecond // 1000 * 1000)
    store = Store(mongo_uri, database, now=now)
    writer = Writer(store, Random(SEED))
    try:
        await schema.create(store)
        tasks = store.driver.collection(store.tasks)
        await tasks.drop_index("taskmesh_delete")
        documents = [{n: v for n, v in d.items() if v is not None} for d in Documents(SEED, now).draw(_COUNT)]
        await tasks.insert_many(documents)
        stream = await open_stream(store, Interest(names=frozenset(["job"]), control=True))
        before = {d["_id"]: Oracle(d) for d in await store.find({}, {})}
        done = {id_: await writer.touch(id_, oracle) for id_, oracle in before.items() if int(id_[4:]) % 8}
        await settle(store)
        after = {d["_id"]: Oracle(d) for d in await store.find({}, {})}
        await store.insert([{**documents[0], "_id": "job:last", "next_claim_time": now}], 0)
        announced = set()
        while "job:last" not in announced:
            event = await stream.next()
            announced.add(change_from(event).id)
        await stream.close()
    finally:
        await store.close()
    opened = [id_ for id_ in before if not claimable(before[id_], now) and claimable(after[id_], now)]
    assert len(opened) > _COUNT / 20
    assert not {id_: done.get(id_, "settle") for id_ in opened if id_ not in announced}


def claimable(oracle: Oracle, now: datetime) -> bool:
    """Whether there could be a worker that may claim the task."""
    return any(oracle.may_claim(worker, now) for worker in (*WORKERS, ANYBODY_ELSE))
