"""What is declared as a schedule: any params, at any time, with any backlog."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import anyio
import pytest

from taskmesh import InvalidOption, TaskMesh
from taskmesh.consumer.ticker import Ticker
from taskmesh.integrations.encryption import AESCodec
from taskmesh.store.triggers import schedules
from tests.waiting import eventually
from tests.working import lanes_of, working

_NAIVE = datetime(2036, 1, 1, 12, 0, 0, 123_456)  # noqa: DTZ001 -- as people pass them


@pytest.mark.parametrize("value", [_NAIVE, float("nan"), (1, 2), {"deep": [(_NAIVE,)]}], ids=repr)
async def test_params_that_come_back_in_another_form_are_declared_once(mesh: TaskMesh, value: Any) -> None:
    with anyio.fail_after(30):
        for _ in range(2):
            await mesh.every("others.task", schedule_id="s", interval_ms=60_000, params={"value": value})
    document = await mesh.store.driver.collection("schedules").find_one({"_id": "s"})
    assert document["revision"] == 0, "the second declaration changed nothing"


async def test_a_backlog_too_long_for_one_look_is_worked_off_in_several(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put in time is not put again."""
    monkeypatch.setattr(schedules, "_READ_GOOD_FOR_MS", 300)

    @mesh.task
    async def tick() -> None: ...

    await mesh.every(tick, schedule_id="s", interval_ms=1_000, missed="all")
    ago = mesh.clock.now() - timedelta(seconds=200)
    await mesh.store.driver.collection("schedules").update_one({"_id": "s"}, {"$set": {"next_time": ago}})
    ticker = Ticker(mesh.store, mesh.schedules, lanes_of("one", []))

    async def all_published() -> bool:
        await ticker.run_once()
        published = await mesh.store.driver.collection("tasks").count_documents({"_id": {"$regex": "^tick:s@"}})
        return bool(published >= 200)

    await eventually(all_published, 240.0, what="200 ticks are published")


async def test_the_first_schedule_after_a_time_without_any_has_missed_nothing(mesh: TaskMesh) -> None:
    meta = mesh.store.driver.collection("meta")

    @mesh.task
    async def tick() -> None: ...

    async with working(mesh):
        await schedules.attend(mesh.store)
        # As if nobody had looked after schedules for a while, as there are none.
        await meta.update_one({"_id": "periodic"}, [{"$set": {"seen": {"$subtract": ["$$NOW", 60_000]}}}])
        declared = await mesh.every(tick, schedule_id="s", interval_ms=1_000, missed="skip")

        async def ticks() -> list[datetime]:
            return [t.time for s in await mesh.schedules.all() for t in s.ticks]

        first = (await eventually(ticks, what="it ticks"))[0]
    assert declared.next_time is not None
    assert first == declared.next_time


async def test_put_changes_what_is_given_alone_and_is_written_down(mesh: TaskMesh) -> None:
    await mesh.schedules.put(
        "s", name="report", cron="0 3 * * *", timezone="Europe/Berlin", params={"a": 1}, priority=5
    )
    changed = await mesh.schedules.put("s", interval_ms=60_000, overlap="skip", by="ann")
    assert (changed.name, changed.cron, changed.interval_ms, changed.overlap) == ("report", None, 60_000, "skip")
    assert (changed.params, changed.settings, changed.timezone) == ({"a": 1}, {"priority": 5}, "Europe/Berlin")
    assert (await mesh.schedules.put("s", name="other")).params == {"a": 1}
    assert "ann" in [each.by for each in await mesh.audit.actions() if each.action == "schedule.declare"]


async def test_put_leaves_params_alone_that_it_cannot_read(mesh: TaskMesh, mongo_uri: str) -> None:
    codec = AESCodec(keys={"k": bytes(32)}, current="k")
    async with TaskMesh(mongo_uri, database=mesh.connection.database, codec=codec) as owner:
        await owner.schedules.put("s", name="report", interval_ms=60_000, params={"card": "4111"})
        sealed = await schedules.read(mesh.store, "s")
        await mesh.schedules.put("s", interval_ms=30_000)
        changed = await schedules.read(mesh.store, "s")
        assert sealed is not None
        assert changed is not None
        assert (changed["params"], changed["interval_ms"]) == (sealed["params"], 30_000)
        [seen] = await owner.schedules.all()
        assert seen.params == {"card": "4111"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cron": "0 3 * * *"}, "to create it, name the task that it publishes"),
        ({"name": "report"}, "either cron or interval_ms"),
        ({"name": "report", "cron": "0 3 *"}, "cron='0 3 \\*' cannot be read"),
        ({"name": "report", "interval_ms": 60_000, "missed": "never"}, "missed must be"),
        ({"name": "report", "interval_ms": 60_000, "prioritty": 1}, "prioritty"),
    ],
)
async def test_put_refuses_what_makes_no_schedule(mesh: TaskMesh, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        await mesh.schedules.put("s", **given)
    assert await mesh.schedules.all() == []
