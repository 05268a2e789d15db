"""Groups take turns, whatever waits in each of them, and whether or not there is a limit."""

from __future__ import annotations

import random
from dataclasses import dataclass

import anyio
import pytest

from taskmesh import TaskMesh
from taskmesh.consumer.candidates.turns import Turns
from tests.waiting import eventually
from tests.working import all_working


async def test_groups_take_turns_and_within_each_the_oldest_goes_first(mesh: TaskMesh) -> None:
    ran: list[tuple[str, int]] = []

    @mesh.task(queue="shared")
    async def work(tenant: str, n: int) -> None:
        ran.append((tenant, n))

    for tenant, count in (("a", 20), ("b", 12), ("c", 5)):
        tasks = work.configure(group=tenant)
        for n in range(count):
            await tasks.publish(f"{tenant}-{n}", tenant=tenant, n=n)
    await work.configure(group="b", priority=5).publish("urgent", tenant="b", n=99)
    with anyio.fail_after(120):
        await mesh.consumer(worker_id="w1", concurrency=1).run(until_idle=True)
    assert ran[0] == ("b", 99), "a higher priority goes before all turns"
    assert len(ran) == 38
    for tenant, count in (("a", 20), ("b", 12), ("c", 5)):
        assert [n for one, n in ran[1:] if one == tenant] == list(range(count))
    first_turns = [tenant for tenant, _ in ran[1:16]]
    assert all({*first_turns[i : i + 3]} == {"a", "b", "c"} for i in range(0, 15, 3)), first_turns
    next_turns = [tenant for tenant, _ in ran[16:30]]
    assert all({*next_turns[i : i + 2]} == {"a", "b"} for i in range(0, 14, 2)), next_turns


async def test_a_foreign_document_among_the_tasks_of_a_group_holds_nobody_up(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task(queue="shared")
    async def work(tenant: str) -> None:
        ran.append(tenant)

    # More than a scan reads at a time, so that each group is looked at by itself.
    await work.configure(group="big").publish_many({f"big-{n:05}": {"tenant": "big"} for n in range(3_000)})
    await work.configure(group="small").publish("k", tenant="small")
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    task = await tasks.find_one({"_id": "work:k"})
    assert task is not None
    await tasks.insert_one(task | {"_id": "work:foreign", "task_option": {**task["task_option"], "priority": "high"}})
    with anyio.fail_after(120):
        async with all_working(mesh, ["w1"], concurrency=2):
            await eventually(lambda: "small" in ran)
    assert len(ran) < 3_000


@pytest.mark.parametrize("limited", [False, True], ids=["no limit", "a limit"])
@pytest.mark.parametrize("workers", [1, 3])
async def test_a_tenant_with_few_tasks_does_not_wait_behind_one_with_thousands(
    mesh: TaskMesh, limited: bool, workers: int
) -> None:
    ran: list[str] = []

    @mesh.task(queue="shared")
    async def work(tenant: str) -> None:
        ran.append(tenant)
        await anyio.sleep(0.02)  # that is the task's own length

    if limited:
        await mesh.set_limit("shared", running=4, group_running=3)
    # More than a scan reads at a time.
    await work.configure(group="big").publish_many({f"big-{n:05}": {"tenant": "big"} for n in range(3_000)})
    early = [await work.configure(group=f"s{n}").publish(f"early-{n}", tenant=f"s{n}") for n in range(5)]
    async with all_working(mesh, [f"w{n}" for n in range(workers)], concurrency=2):
        for handle in early:
            await handle.result(timeout=60)
        before_late = len(ran)
        late = [await work.configure(group=f"t{n}").publish(f"late-{n}", tenant=f"t{n}") for n in range(5)]
        for handle in late:
            await handle.result(timeout=60)
    assert max(ran.index(f"s{n}") for n in range(5)) < 600, "they came after three thousand"
    assert max(ran.index(f"t{n}") for n in range(5)) - before_late < 600


async def test_a_queue_without_groups_keeps_its_order_beside_one_with_groups(mesh: TaskMesh) -> None:
    """Turns are for the groups of one queue: they take nothing from other queues."""
    ran: list[str] = []

    @mesh.task
    async def work(key: str) -> None:
        ran.append(key)

    keys = []
    for n in range(10):
        for queue, group in (("plain", None), ("grouped", f"g{n}"), ("grouped", "big")):
            keys.append(f"{queue}-{n}-{group}")
            await work.configure(queue=queue, group=group).publish(keys[-1], key=keys[-1])
    with anyio.fail_after(120):
        await mesh.consumer(worker_id="w1", concurrency=1).run(until_idle=True)
    assert [key for key in ran if key.startswith("plain")] == [key for key in keys if key.startswith("plain")]
    places = [place for place, key in enumerate(ran) if key.startswith("plain")]
    assert places == [3 * n for n in range(10)], "each at its place in the order of publication"


@dataclass(eq=False)
class Waiting:
    """What waits in a line, as far as turns go."""

    id: str
    group: str | None
    rank: tuple[int, int]


@pytest.mark.parametrize("seed", range(20))
def test_no_group_waits_for_more_than_one_turn_of_each_other(seed: int) -> None:
    chance = random.Random(seed)
    turns: Turns[Waiting] = Turns()
    held: dict[str, Waiting] = {}
    taken_since: dict[str, list[str]] = {}
    """Of each group that waits: who has been served since it joined or was served."""
    for step in range(2_000):
        if chance.random() < 0.5:
            candidate = Waiting(f"k{step}", f"g{chance.choice([0, 0, 0, 0, chance.randrange(12)])}", (0, step))
            held[candidate.id] = candidate
            turns.add(candidate)
            taken_since.setdefault(str(candidate.group), [])
        elif chance.random() < 0.1 and held:
            gone = held.pop(chance.choice(list(held)))
            if all(each.group != gone.group for each in held.values()):
                taken_since.pop(str(gone.group), None)
        elif turns.first(held) is not None:
            found = turns.take(held)
            assert found is not None
            of_group = [each for each in held.values() if each.group == found.group]
            assert found is min(of_group, key=lambda each: each.rank)
            del held[found.id]
            for group, others in taken_since.items():
                others.append(str(found.group))
                assert group == found.group or others.count(str(found.group)) <= 2, f"{group} waited: {others}"
            taken_since[str(found.group)] = []
            if len(of_group) == 1:
                del taken_since[str(found.group)]
    assert len(held) < 2_000
