"""The guard against slowing down, in counts and not in times: they are the same on a busy machine as on a quiet one.

Each limit stands well above what is counted today (in the comment) and well below what the next worse design would cost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient

from benchmarks.commands import Commands
from taskmesh import TaskMesh, TaskOption, current_task
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import finished, parts_of, working

TASKS = 2_000
CONCURRENCY = 200
_IN_ORDER = "taskmesh_waiting_in_order"


@pytest.fixture
def commands() -> Commands:
    """What the mesh under test asks of the server."""
    return Commands(sizes=True)


@pytest.fixture
async def counted(mongo_uri: str, database: str, commands: Commands) -> AsyncIterator[TaskMesh]:
    """A connected mesh whose commands are counted."""
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
        mongo_uri, appname="taskmesh", event_listeners=[commands], tz_aware=True
    )
    async with client, TaskMesh(client, database=database) as mesh:
        yield mesh


@contextmanager
def profiled(uri: str, database: str) -> Iterator[list[dict[str, Any]]]:
    """Every operation on the tasks meanwhile, as the server's profiler wrote it down; there when the block has ended."""
    operations: list[dict[str, Any]] = []
    with MongoClient[dict[str, Any]](uri) as client:
        client[database].command("profile", 2)
        try:
            yield operations
        finally:
            client[database].command("profile", 0)
        operations += client[database]["system.profile"].find({"ns": f"{database}.tasks"})


async def _work_off(mesh: TaskMesh, answers: bool) -> None:
    """Publish, and work everything off."""
    # All slots end together: how many outcomes one command takes is then a matter of the engine, and not of the machine's load.
    together = asyncio.Barrier(CONCURRENCY)

    @mesh.task
    async def job(n: int) -> dict[str, int] | None:
        await together.wait()
        return {"n": n} if answers else None

    await job.publish_many({str(n): {"n": n} for n in range(TASKS)})
    async with working(mesh, "w", concurrency=CONCURRENCY) as consumer:
        await eventually(lambda: consumer.finished == TASKS, 60, what="all are done")


def _check_commands(cost: Counter[str]) -> None:
    share = {name: count / TASKS for name, count in cost.items()}
    assert share["update"] < 0.06, share  # 0.03: claims of 100 at a time, and as many finishes
    assert share["find"] < 0.06, share  # 0.02: what was won; scans
    assert sum(share.values()) < 0.15, share  # 0.06: also heartbeats and the like, which come by time


async def test_a_task_of_a_backlog_costs_a_small_part_of_a_command_and_few_bytes(
    counted: TaskMesh, commands: Commands
) -> None:
    before = commands.by_name.copy()
    await _work_off(counted, answers=True)

    _check_commands(commands.by_name - before)
    assert commands.bytes_sent / TASKS < 1_600  # 900: published, named in scans, claims and finishes, its result
    assert commands.bytes_received / TASKS < 2_000  # 1 200: found by a scan, read as claimed


async def test_without_results_it_costs_no_more_and_nothing_is_examined_that_is_not_wanted(
    mongo_uri: str, database: str, counted: TaskMesh, commands: Commands
) -> None:
    before = commands.by_name.copy()
    with profiled(mongo_uri, database) as operations:
        await _work_off(counted, answers=False)

    _check_commands(commands.by_name - before)
    finds = [operation for operation in operations if operation["op"] in ("query", "getmore")]
    updates = [operation for operation in operations if operation["op"] == "update"]
    returned = sum(find["nreturned"] for find in finds)
    assert returned >= 1.5 * TASKS, (
        "each was found by a scan, and most were read as claimed: those claimed alone come with it"
    )
    assert sum(find["docsExamined"] for find in finds) / returned < 1.3  # 1.0
    matched = sum(update["nMatched"] for update in updates)
    assert matched >= 1.5 * TASKS, "each was claimed, most of them in sets, and finished"
    assert sum(update["docsExamined"] for update in updates) / matched < 1.3  # 1.0


async def test_a_scan_reads_as_much_as_is_taken_until_the_next_and_not_a_thousand_each_time(
    mongo_uri: str, database: str, mesh: TaskMesh
) -> None:
    @mesh.task
    async def job() -> None:
        await asyncio.sleep(0.1)

    await job.publish_many({str(n): {} for n in range(3_000)})
    with profiled(mongo_uri, database) as operations:
        async with working(mesh, "w", concurrency=10) as consumer:
            scanner = parts_of(consumer).scanner
            await eventually(lambda: scanner.scans >= 4, what="it has scanned some times")
    pages = [each["nreturned"] for each in operations if each.get("command", {}).get("hint") == _IN_ORDER]
    assert len(pages) > 1
    # One page is large: how much it will take it does not know yet. The others are of ten slots, a tenth of a second for each:
    # 250 on a quiet machine.
    assert sum(size > 600 for size in pages) <= 1, pages


async def test_one_change_event_is_delivered_for_a_task(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def job() -> None:
        """Do nothing."""

    async with TaskMesh(mongo_uri, database=database) as publisher, working(mesh, "w"):
        before = mesh.feed.delivered
        for n in range(50):
            await publisher.publish("job", str(n))
        for n in range(50):
            await finished(publisher, "job", str(n))

        assert mesh.feed.delivered - before <= 55  # 50: the insert; neither the claim nor the SUCCESS


async def test_no_change_event_is_delivered_for_a_renewed_lease(mesh: TaskMesh) -> None:
    renewed: list[Any] = []

    @mesh.task(option=TaskOption(ping_interval_ms=100, worker_timeout_ms=5_000))
    async def job() -> None:
        task = current_task()

        async def lease_end() -> Any:
            return (await mesh.get("job", task.key)).task_state.worker_states[0].ping_expire_time

        renewed.append(await lease_end())
        before = mesh.feed.delivered

        async def renewed_again() -> bool:
            if (end := await lease_end()) != renewed[-1]:
                renewed.append(end)
            return len(renewed) > 5

        await eventually(renewed_again, what="the lease was renewed five times")
        assert mesh.feed.delivered == before

    async with working(mesh, "w"):
        await job.publish("k")
        assert (await finished(mesh, "job", "k")).status == "SUCCESS"
    assert len(renewed) > 5


async def test_a_step_is_one_update_whatever_the_execution_has_recorded_before(
    counted: TaskMesh, commands: Commands
) -> None:
    """Else the short form has been tried in vain: what it knows of the records before is not what they are."""
    steps = 20
    costs: list[int] = []

    async def value(n: int) -> str:
        return str(n)

    @counted.task
    async def child() -> None: ...

    @counted.task
    async def parent() -> None:
        task = current_task()
        await task.results([await task.start(child, f"c{n}") for n in range(2)])
        await task.wait_for("go")
        await task.sleep("nap", milliseconds=1)
        await task.step("first", value, 0)
        before = commands.by_name["update"]
        for n in range(steps):
            await task.step("again", value, n)
        costs.append(commands.by_name["update"] - before)

    async with working(counted, "w"):
        handle = await parent.publish("p")
        await handle.signal("go")
        await handle.result(60)
    assert steps <= costs[0] < 1.2 * steps  # 1: others come by time


async def test_whoever_is_told_of_finished_children_looks_at_those_alone(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    children = 3_000

    @mesh.task
    async def child() -> None: ...

    @mesh.task
    async def parent() -> int:
        task = current_task()
        return len(await task.results(await task.start_many(child, {f"c{n}": {} for n in range(children)})))

    with profiled(mongo_uri, database) as operations:
        async with working(mesh, "w", concurrency=CONCURRENCY):
            assert await (await parent.publish("p")).result(120) == children
    told = [operation for operation in operations if "ask_time" in str(operation["command"])]
    examined = sum(operation.get("docsExamined", 0) for operation in told)
    assert children < examined < 3.5 * children, examined  # 2.1: each is read, and its mark removed


async def test_parents_that_start_children_at_one_moment_cost_a_few_commands(
    counted: TaskMesh, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    parents, most = 100, 30
    monkeypatch.setattr("taskmesh.consumer.durable.together.MAX_PUBLICATIONS", most)
    all_at_once = asyncio.Barrier(parents)
    began: set[str] = set()

    @counted.task
    async def child() -> str:
        return current_task().key

    @counted.task
    async def parent() -> list[str]:
        task = current_task()
        if task.key not in began:
            began.add(task.key)
            await all_at_once.wait()
        return await task.results([await task.start(child, task.key)])

    handles = await parent.publish_many({f"p{n}": {} for n in range(parents)})
    async with working(counted, "w", concurrency=CONCURRENCY):
        found = await asyncio.gather(*(handle.result(120) for handle in handles))
    assert found == [[handle.key] for handle in handles]
    # 4: all start in one turn of the loop, so each set is full
    assert parents / most < commands.by_name["commitTransaction"] <= parents // 10, commands.by_name
    assert commands.total < 5 * parents, commands.by_name  # 1; it was 11, with a transaction and three reads for each


async def test_transactions_that_begin_at_one_moment_extend_their_leases_by_few_commands(
    counted: TaskMesh, commands: Commands
) -> None:
    begun = asyncio.Barrier(100)

    @counted.task
    async def order(n: int) -> None:
        await begun.wait()
        async with current_task().transaction():
            current_task().set_result(n)

    handles = await order.publish_many({str(n): {"n": n} for n in range(100)})
    async with working(counted, "w", concurrency=CONCURRENCY):
        await asyncio.gather(*(handle.result(120) for handle in handles))
    # 105: a SUCCESS for each, and few beside; it was 205
    assert commands.by_name["commitTransaction"] == 100 <= commands.by_name["update"] < 150, commands.by_name


async def test_many_that_exist_are_changed_by_a_few_commands(counted: TaskMesh, commands: Commands) -> None:
    @counted.task
    async def job(n: int) -> None: ...

    await job.publish_many({str(n): {"n": n} for n in range(500)})
    commands.by_name.clear()
    handles = await job.configure(run_again=True).publish_many({str(n): {"n": -n} for n in range(500)})
    assert all(handle.updated for handle in handles)
    assert commands.total < 20, commands.by_name  # 11: one for each fifty, and one that reads all; it was 1,004
    commands.by_name.clear()
    for n in range(10):
        await job.configure(run_again=True).publish(str(n), n=n)
    assert commands.total < 30, commands.by_name  # two each; it was four


async def test_a_handler_that_publishes_many_that_exist_does_it_by_a_few_commands(
    counted: TaskMesh, commands: Commands
) -> None:
    @counted.task(queue="later")
    async def job(n: int) -> None: ...

    @counted.task
    async def plan() -> None:
        commands.by_name.clear()
        for n in range(200):
            await current_task().publish(job.configure(run_again=True), str(n), n=-n)

    await job.publish_many({str(n): {"n": n} for n in range(200)})
    handle = await plan.publish("p")
    async with working(counted, "w", queues=["default"]):
        await handle.result(120)
    # 4 for fifty tasks each, and few beside; it was 201
    assert 4 <= commands.by_name["update"] < 25, commands.by_name
    assert (await counted.get("job", "199")).params == {"n": -199}


async def test_tasks_that_exist_are_changed_by_a_few_commands_if_their_calls_come_at_one_moment(
    counted: TaskMesh, commands: Commands, mongo_uri: str
) -> None:
    @counted.task
    async def job(n: int) -> None: ...

    async def change(n: int, **how: Any) -> list[bool]:
        commands.by_name.clear()
        handles = await asyncio.gather(*(job.configure(**how).publish(str(key), n=n) for key in range(200)))
        assert commands.total <= 50, commands.by_name  # see below; it was 802
        return [handle.updated for handle in handles]

    await job.publish_many({str(n): {"n": 0} for n in range(200)})
    assert all(await change(1, run_again=True))  # 5
    async with failing_commands(mongo_uri, ["update"], times=1, closeConnection=True) as have_failed:
        assert all(await change(2, run_again=True))  # 15
        await have_failed()
    assert not any(await change(2, update_existing_params=True))  # 9


async def test_tasks_that_wait_for_others_cost_a_few_commands_if_they_come_at_one_moment(
    counted: TaskMesh, commands: Commands
) -> None:
    pairs = 200

    @counted.task
    async def part(n: int) -> int:
        return n

    @counted.task
    async def whole(n: int) -> int:
        return n

    parts = await part.publish_many({str(n): {"n": n} for n in range(pairs)})
    commands.by_name.clear()
    handles = await asyncio.gather(*(counted.publish("whole", each.key, after={"n": each}) for each in parts))
    assert commands.total < pairs / 2, commands.by_name  # 9; it was 1,260
    commands.by_name.clear()
    async with working(counted, "w", concurrency=CONCURRENCY):
        assert await asyncio.gather(*(handle.result(120) for handle in handles)) == list(range(pairs))
    assert commands.total < 2 * pairs, commands.by_name  # 103; it was 600


async def test_who_claims_one_task_writes_it_once(mongo_uri: str, database: str, mesh: TaskMesh) -> None:
    """What the driver may repeat, the server keeps a second time, in `config.image_collection`: a sixth of the claim."""

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    with profiled(mongo_uri, database) as operations:
        async with working(mesh, "w"):
            await job.publish("k")
            await finished(mesh, "job", "k")
    claims = [each for each in operations if "findAndModify" in each["command"]]
    assert claims
    assert not [claim for claim in claims if "txnNumber" in claim["command"]]


async def test_a_publication_takes_few_turns_of_the_loop_more_than_a_bare_insert(mesh: TaskMesh) -> None:
    """Each costs as much as 20 µs where little else is at work: the loop asks for events in each."""
    turns = _Turns(asyncio.get_running_loop())
    database = mesh.store.driver.database

    @mesh.task
    async def job() -> None:
        """Do nothing."""

    await job.publish("first")
    ours = [await turns.of(job.publish(f"{n}")) for n in range(20)]
    bare = [
        await turns.of(
            database.command({"insert": "bare", "documents": [{"_id": n}], "writeConcern": {"w": "majority"}})
        )
        for n in range(20)
    ]
    assert min(ours) - min(bare) < 4, (ours, bare)  # 2: what is published together is sent at the end of a turn


class _Turns:
    """Counts the turns of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._count = 0
        turn = loop._run_once  # type: ignore[attr-defined]

        def counted() -> None:
            self._count += 1
            turn()

        loop._run_once = counted  # type: ignore[attr-defined]

    async def of(self, call: Awaitable[object]) -> int:
        """Make a call; return how many turns it took."""
        before = self._count
        await call
        return self._count - before
