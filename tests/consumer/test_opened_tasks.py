"""What the stream tells of tasks that become claimable again: who looks at them, and who leaves them to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from taskmesh import Retry, TaskMesh, current_task
from taskmesh.consumer import listener, scanner
from taskmesh.consumer.candidates import backup_claims
from taskmesh.store import find
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of

WORKERS = [f"w{n}" for n in range(5)]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Which worker's listener has looked at which task, and how often."""
    looked: Counter[tuple[str, str]] = Counter()
    look_up = find.look_up

    async def look(store: Any, me: Any, ids: Sequence[str]) -> Any:
        looked.update((me.id, id_) for id_ in ids)
        return await look_up(store, me, ids)

    monkeypatch.setattr(listener, "look_up", look)
    return looked


async def test_the_first_worker_looks_at_once_the_second_later_and_the_others_not_at_all(
    mesh: TaskMesh, looked_at: Counter[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for: set[tuple[str, str]] = set()
    add = backup_claims.BackupClaims.add

    def added(self: backup_claims.BackupClaims, id_: str, due: float, place: int, **by_a_scan: Any) -> None:
        if not by_a_scan:
            waited_for.add((self._me.id, id_))
        add(self, id_, due, place, **by_a_scan)

    monkeypatch.setattr(backup_claims.BackupClaims, "add", added)

    @mesh.task
    async def step() -> None:
        if current_task().attempt == 1:
            raise Retry(delay_ms=0)

    async with all_working(mesh, WORKERS, concurrency=50) as consumers:
        partitions = {consumer.worker_id: parts_of(consumer).partitions for consumer in consumers}
        await eventually(lambda: {each.others_cnt for each in partitions.values()} == {4})
        await step.publish_many({str(n): {} for n in range(40)})
        for n in range(40):
            await finished(mesh, "step", str(n))
        places = {(who, id_): partitions[who].place_to_hear(id_, "default") for who, id_ in looked_at}
        assert set(places.values()) == {0}
        assert len(looked_at) == 40
        ids = {id_ for _, id_ in looked_at}
        second = {(who, id_) for id_ in ids for who in WORKERS if partitions[who].place_to_hear(id_, "default") == 1}
        await eventually(lambda: second <= waited_for)
        assert waited_for == second


async def test_one_for_a_certain_worker_starts_at_once_again_whatever_its_place(
    mesh: TaskMesh, looked_at: Counter[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    @mesh.task
    async def step() -> None:
        ran.append(current_task().worker_id)
        if current_task().attempt == 1:
            raise Retry(delay_ms=0)

    async with all_working(mesh, WORKERS, concurrency=5) as consumers:
        partitions = {consumer.worker_id: parts_of(consumer).partitions for consumer in consumers}
        await eventually(lambda: {each.others_cnt for each in partitions.values()} == {4})
        last = next(who for who in WORKERS if partitions[who].place_to_hear("step:k", "default") == 4)
        monkeypatch.setattr(scanner, "SCAN_EVERY_S", 3_600.0)
        await step.configure(specific_worker_ids=[last]).publish("k")
        await finished(mesh, "step", "k")
        assert ran == [last, last]
        assert looked_at[last, "step:k"]
