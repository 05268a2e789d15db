"""T39, D16: a failover takes back what only the old primary had. Nothing that somebody was told or acted upon is among that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern
from pymongo.errors import PyMongoError

from taskmesh import Status, TaskMesh, TaskMeshError
from taskmesh.embedded import replica
from tests.chaos.cluster import Cluster, cluster
from tests.chaos.scene_handlers import define
from tests.chaos.stage import Stage, stage
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.blocks_the_loop]  # workers are started and stopped by blocking calls

_SLOW_ELECTIONS = {"electionTimeoutMillis": 8_000, "heartbeatIntervalMillis": 300}
"""So that an old primary takes itself for one for a while, long enough on a busy machine."""
_TASKS = 10


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path / "cluster", settings=_SLOW_ELECTIONS) as started:
        yield started


async def test_t39_what_a_failover_takes_back_nobody_was_told(servers: Cluster, database: str, tmp_path: Path) -> None:
    async with stage(servers.uri, database, tmp_path) as set_up:
        w1 = set_up.worker("w1", concurrency=1)
        await set_up.publish("running", {"waits": True})
        await set_up.until_marked("started")
        w3 = set_up.worker("w3", "waits_before_claims")
        for n in range(_TASKS):
            await set_up.publish(f"due-{n}", worker_timeout_ms=20_000)
        await set_up.until("w3 wants to claim")
        w2 = set_up.worker("w2", "waits_before_claims")
        old = servers.members[servers.primary()]
        others = [member.pid for member in servers.members if member is not old]
        async with AsyncMongoClient[dict[str, Any]](f"mongodb://{old.address}/?directConnection=true") as there:
            servers.divide([old.pid, w1.pid, w3.pid], [*others, w2.pid, os.getpid()])
            await there.get_database(database, write_concern=WriteConcern(w=1)).marks.insert_one({"_id": "taken back"})
            for sign in ("w1 may end", "w2 may end", "w3 may end", "w2 may claim", "w3 may claim"):
                set_up.signs.give(sign)
            told = await asyncio.gather(*(_publish_there(there, database, f"there-{n}") for n in range(_TASKS)))
            for n in range(_TASKS):
                await _publish_here(set_up, f"here-{n}")
            for key in ("running", *(f"due-{n}" for n in range(_TASKS)), *(f"here-{n}" for n in range(_TASKS))):
                await set_up.until_status(Status.SUCCESS, key)
        servers.heal()

        async def the_mark_is_gone() -> bool:
            async with AsyncMongoClient[dict[str, Any]](f"mongodb://{old.address}/?directConnection=true") as there:
                with suppress(PyMongoError):
                    found = there.get_database(database, read_preference=ReadPreference.NEAREST).marks
                    return await found.find_one({"_id": "taken back"}) is None
            return False

        await eventually(the_mark_is_gone, 60.0, what="the old primary has taken back what it alone had")
        for n, created in enumerate(told):
            set_up.note_published(f"there-{n}", created)
        findings = await set_up.end(60.0)
    assert [str(violation)[:500] for violation in findings.violations] == []
    assert None in told, "the old primary was cut off from the others when they were published"


async def test_t39_no_handler_starts_by_a_claim_that_a_failover_takes_back(
    servers: Cluster, database: str, tmp_path: Path
) -> None:
    async with stage(servers.uri, database, tmp_path) as set_up:
        set_up.worker("w1", "waits_before_claims")
        await set_up.publish(worker_timeout_ms=60_000)
        await set_up.until("w1 wants to claim")
        primary = servers.members[servers.primary()]
        others = [member for member in servers.members if member is not primary]
        for member in others:
            member.kill()
        set_up.signs.give("w1 may claim")

        def has_it() -> bool:
            """Nobody but this primary knows of the claim."""
            with replica.direct_client(primary.address) as client:
                found = client[database]["tasks"].find_one({"_id": "work:victim"}) or {}
            return bool(found["task_state"]["worker_states"])

        await eventually(has_it, 10.0, what="the primary that is left alone has the claim")
        await asyncio.sleep(1.0)  # time enough for the worker to be told so, and to start the handler
        primary.kill()
        for member in others:
            member.start()
        servers.primary()
        primary.start()
        findings = await set_up.end(60.0)
    assert [str(violation)[:500] for violation in findings.violations] == []


@pytest.mark.parametrize(
    ("broken", "violated"), [((), set()), (("believes_one_server",), {"A1"})], ids=["whole", "believes one server"]
)
async def test_d16_what_waits_for_a_task_does_not_start_by_a_finish_that_a_failover_takes_back(
    servers: Cluster, database: str, tmp_path: Path, broken: tuple[str, ...], violated: set[str]
) -> None:
    """Who finished `seen` asks on the old primary, where `taken` is finished as well, and opens gates on the new one."""
    async with stage(servers.uri, database, tmp_path) as set_up:
        # Its lease outlasts the partition, so that the old primary takes its SUCCESS.
        await set_up.publish("taken", {"waits": True}, specific_worker_ids=("w1", "w3"), worker_timeout_ms=8_000)
        await set_up.publish("seen", {"waits": True}, specific_worker_ids=("w2",))
        after = [("work", "taken"), ("work", "seen")]
        await set_up.publish("join", after=after, specific_worker_ids=("w3",))
        # It knows by its claim that somebody waits for the task: else the first thing that it tries is no write, but waits too.
        w1 = set_up.worker("w1", "scans_when_told")  # so it does not ask in the place of w2
        await set_up.until_marked("started")
        w2 = set_up.worker("w2", "opens_when_told", broken=broken)
        await set_up.until_marked("started", 2)
        set_up.signs.give("w2 may end")
        await set_up.until("w2 wants to ask")
        old = servers.members[servers.primary()]
        others = [member for member in servers.members if member is not old]
        here = [*(member.pid for member in others), os.getpid()]
        servers.divide([old.pid, w1.pid, w2.pid], here)
        set_up.signs.give("w1 may end")

        def is_finished_there() -> bool:
            """Nobody but the old primary knows of it."""
            with replica.direct_client(old.address) as client:
                return client[database]["tasks"].find_one({"_id": "work:taken", "status": "SUCCESS"}) is not None

        await eventually(is_finished_there, 3.0, what="the old primary has the finish")
        set_up.signs.give("w2 may ask")
        await set_up.until("w2 has asked")
        assert replica.is_primary(old.address), "it has answered as a primary"
        servers.divide([old.pid, w1.pid], [*here, w2.pid])
        await eventually(lambda: any(replica.is_primary(member.address) for member in others), what="a new primary")
        set_up.worker("w3")
        set_up.signs.give("w2 may open")
        await set_up.until_marked("started", 4 if broken else 3)
        if not broken:
            assert (await set_up.task("join")).status is Status.INIT
        set_up.signs.give("w3 may end")
        for key in ("taken", "join"):
            await set_up.until_status(Status.SUCCESS, key)
        servers.heal()
        findings = await set_up.end(60.0)
    assert set(findings.broken) == violated, [str(violation)[:500] for violation in findings.violations]
    starts = [mark.key for mark in set_up.fleet.history if mark.what == "started"]
    assert sorted(starts) == ["join", "seen", "taken", "taken"]
    assert broken or starts[-1] == "join"


async def _publish_here(set_up: Stage, key: str) -> None:
    """Publish on the side that elects a new primary, again until it is told that it is done."""
    while True:
        try:
            return await set_up.publish(key)
        except (PyMongoError, TaskMeshError):
            set_up.note_published(key, None)


async def _publish_there(client: Any, database: str, key: str) -> bool | None:
    """Publish on the old primary's side; return what the publisher was told, None for an error."""
    mesh = TaskMesh(client, database=database)
    work = define(mesh)
    try:
        return (await work.publish(key)).created
    except (PyMongoError, TaskMeshError):
        return None
