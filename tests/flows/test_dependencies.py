"""A task waits for others until all of them are SUCCESS; else it does what its publisher said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from benchmarks.commands import Commands
from taskmesh import (
    InvalidOption,
    Status,
    Task,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    current_blocking_task,
    current_task,
)
from taskmesh.client.definition import TaskDefinition
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.store.relations import dependencies
from tests.waiting import eventually
from tests.working import finished, status_is, working


def define(mesh: TaskMesh) -> tuple[TaskDefinition[Any, Any], TaskDefinition[Any, Any]]:
    """Something to wait for, which fails as long as `broken` stands in its params, and something that waits."""

    @mesh.task(option=TaskOption(max_unexpected_retries=0, max_timeouts=0))
    async def part(n: int = 0, broken: bool = False) -> int:
        if broken:
            raise TaskFailed("broken")
        return n

    @mesh.task
    async def join() -> str:
        return "joined"

    return part, join


async def drained(mesh: TaskMesh) -> None:
    """Run all that can be run."""
    await mesh.consumer(worker_id="w1").run(until_idle=True)


async def no_sweep(*_: object, **__: object) -> None:
    """Do nothing where a sweep would be."""


async def waiting_for(mesh: TaskMesh, key: str) -> Task:
    task = await mesh.get("join", key)
    assert (task.status, task.next_claim_time) == (Status.INIT, None)
    return task


async def test_a_task_runs_when_all_it_waits_for_are_success_and_explain_says_what_is_left(mesh: TaskMesh) -> None:
    part, join = define(mesh)
    handles = [await part.publish(f"p{n}", n=n) for n in range(5)]
    later = await join.configure(after=handles).publish("j")
    named = await join.configure(after=[("part", "p0"), later]).publish("pairs")
    await waiting_for(mesh, "j")
    [explained] = await mesh.explain("join", "j")
    gate = next(gate for gate in explained.gates if gate.name == "dependencies")
    assert not gate.open
    assert "5 unfinished: 'part' 'p0' (INIT), 'part' 'p1' (INIT), 'part' 'p2' (INIT) …" in gate.reason
    await drained(mesh)
    assert await later.result(5) == await named.result(5) == "joined"
    started = [(await handle.task()).task_state.worker_states[0].start_time for handle in (later, named)]
    ended = [(await handle.task()).task_state.worker_states[0].success_time for handle in (*handles, later)]
    assert all(end <= started[0] for end in ended[:-1] if end and started[0])
    assert ended[-1] <= started[1]  # type: ignore[operator]


async def test_d13_nothing_to_wait_for_is_done_at_once(mesh: TaskMesh) -> None:
    part, join = define(mesh)
    assert (await (await join.configure(after=[]).publish("j")).task()).next_claim_time is not None
    done = await part.publish("done")
    await drained(mesh)
    assert (await (await join.configure(after=[done]).publish("after")).task()).next_claim_time is not None


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"after": [("part", "nobody"), ("part", "there")]}, TaskNotFound, "'part' 'nobody'"),
        ({"after": [("join", "j")]}, InvalidOption, "would wait for itself"),
        ({"after": "part"}, InvalidOption, "must be a list"),
        ({"after": [7]}, InvalidOption, "a handle, or a name and a key like .*, got 7"),
        ({"after": [("part", "there")], "on_dependency_failure": "ignore"}, InvalidOption, "'fail', 'wait' or 'run'"),
        ({"after": [("part", "there")], "run_again": True}, InvalidOption, "run_again"),
    ],
)
async def test_what_cannot_be_waited_for_is_refused_and_nothing_is_written(
    mesh: TaskMesh, settings: Any, error: type[Exception], said: str
) -> None:
    part, join = define(mesh)
    await part.publish("there")
    with pytest.raises(error, match=said):
        await join.configure(**settings).publish("j")
    with pytest.raises(TaskNotFound):
        await mesh.get("join", "j")
    assert "dependents" not in str(await mesh.connection.store.find({}, {}))


ENDS = {
    "fail": "ended as FAIL",
    "cancel": "ended as CANCELLED",
    "expire": "ended as EXPIRED",
    "lost": "ended as FAIL",
    "delete": "was deleted",
}


async def test_d14_however_a_dependency_ends_its_dependents_fail_wait_or_run(mesh: TaskMesh) -> None:
    part, join = define(mesh)
    soon = datetime.now(UTC) + timedelta(milliseconds=300)
    await part.publish("fail", broken=True)
    await part.publish("cancel")
    await part.configure(expire_time=soon, start_time=soon + timedelta(hours=1)).publish("expire")
    await part.configure(specific_worker_ids=("nobody",)).publish("lost")
    await part.configure(start_time=soon + timedelta(hours=1)).publish("delete")
    good = await part.publish("good")
    for end in ENDS:
        for policy in ("fail", "wait", "run"):
            how: Any = {"on_dependency_failure": policy}
            await join.configure(after=[("part", end), good], **how).publish(f"{end} {policy}")
    # Lost for good by timeouts, by somebody that nobody ever heard of again.
    lost = {"state": "RUNNING", "running_id": "r", "worker_id": "nobody", "start_time": soon, "ping_expire_time": soon}
    tasks = mesh.connection.store.driver.collection("tasks")
    states = {"status": "RUNNING", "settle_time": soon, "task_state.worker_states": [lost]}
    await tasks.update_one({"_id": "part:lost"}, {"$set": states})
    await mesh.cancel("part", "cancel")
    await mesh.delete("part", "delete")
    async with working(mesh, "w1"):
        for end, said in ENDS.items():
            failed = await finished(mesh, "join", f"{end} fail")
            assert failed.status is Status.FAIL, end
            assert failed.fail_reasons[0] == f"its dependency 'part' '{end}' {said}"
            assert (await finished(mesh, "join", f"{end} run")).status is Status.SUCCESS, end
            await waiting_for(mesh, f"{end} wait")
        assert (await finished(mesh, "part", "expire")).status is Status.EXPIRED
        assert (await finished(mesh, "part", "lost")).status is Status.FAIL
        await mesh.retry("part", "cancel")
        assert (await finished(mesh, "join", "cancel wait")).status is Status.SUCCESS
        await part.publish(
            "delete"
        )  # another task of that name: who waited for the old one is retried, and waits for this
        for policy in ("wait", "fail"):
            await mesh.retry("join", f"delete {policy}")
            assert (await finished(mesh, "join", f"delete {policy}")).status is Status.SUCCESS


async def test_what_had_ended_before_is_told_as_it_ended(mesh: TaskMesh) -> None:
    part, join = define(mesh)
    cancelled, failed = await part.publish("cancelled"), await part.publish("failed", broken=True)
    await cancelled.cancel()
    await drained(mesh)
    await join.configure(after=[cancelled, failed]).publish("j")
    assert (await finished(mesh, "join", "j")).fail_reasons == [
        "its dependency 'part' 'cancelled' ended as CANCELLED, 'part' 'failed' ended as FAIL"
    ]


async def test_all_failures_that_are_known_are_told_whoever_tells_and_in_the_order_of_after(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, join = define(mesh)
    parts = [await part.publish(key, broken=key != "good") for key in ("d", "good", "b", "c", "a")]
    handle = await join.configure(after=parts).publish("j")
    with monkeypatch.context() as patch:
        patch.setattr(Dependents, "finished", lambda *_: None)  # nobody tells before all have ended
        patch.setattr(Dependents, "sweep", no_sweep)
        async with working(mesh, "w1"):
            for each in parts:
                await status_is(mesh, "part", each.key, Status.SUCCESS if each.key == "good" else Status.FAIL)
    await dependencies.tell(mesh.store, ["part:a"])
    reason = "its dependency 'part' 'd' ended as FAIL, 'part' 'b' ended as FAIL, 'part' 'c' ended as FAIL"
    assert (await handle.task()).fail_reasons == [reason]


async def test_a_failure_goes_down_the_line_and_a_retry_brings_back_those_that_failed_because_of_it_alone(
    mesh: TaskMesh,
) -> None:
    part, join = define(mesh)
    a, b = await part.publish("a", broken=True), await part.publish("b", broken=True)
    first = await join.configure(after=[a]).publish("first")
    second = await join.configure(after=[first]).publish("second")
    both = await join.configure(after=[a, b]).publish("both")
    async with mesh.events(name="join") as events:
        await drained(mesh)
        for handle in (first, second, both):
            with pytest.raises(TaskError):
                await handle.result(5)
        kinds = [(await anext(events)).kind for _ in range(2)]
    assert "dependency_failed" in kinds
    await part.configure(update_existing_params=True).publish("a", broken=False)
    await mesh.retry("part", "a")
    await drained(mesh)
    assert [await handle.status() for handle in (first, second, both)] == [Status.SUCCESS, Status.SUCCESS, Status.FAIL]
    assert "'part' 'b'" in (await both.task()).fail_reasons[0]


async def test_d10_two_that_finish_at_once_in_transactions_open_what_waits_for_both_without_a_sweep(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dependents, "sweep", no_sweep)
    met = asyncio.Barrier(2)

    @mesh.task
    async def half(n: int) -> int:
        await met.wait()
        async with current_task().transaction():
            current_task().set_result(n)
        return n

    _, join = define(mesh)
    joins = []
    for pair in range(20):
        halves = await half.publish_many({f"{pair}.{n}": {"n": n} for n in range(2)})
        joins.append(await join.configure(after=halves).publish(str(pair)))
    async with working(mesh, "w1", concurrency=4):
        for handle in joins:
            assert await handle.result(30) == "joined"


async def test_a_publisher_that_dies_before_it_links_its_task_is_replaced_by_a_worker(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, join = define(mesh)
    done, open_ = await part.publish("done"), await part.publish("open")
    await drained(mesh)
    await mesh.retry("part", "open")

    async def die(*_: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(dependencies, "tell", die)
        handles = [await join.configure(after=after).publish(str(len(after))) for after in ([done], [done, open_])]
    await drained(mesh)
    assert [await handle.result(5) for handle in handles] == ["joined", "joined"]


async def test_d15_what_is_waited_for_is_kept_and_its_retention_begins_when_nobody_waits_any_more(
    mesh: TaskMesh,
) -> None:
    part, join = define(mesh)
    brief = part.configure(retain_success_ms=0)
    handles = await brief.publish_many({str(n): {"n": n} for n in range(3)})
    later = datetime.now(UTC) + timedelta(hours=1)
    await join.configure(after=handles, start_time=later).publish("j")
    await drained(mesh)
    for handle in handles:
        task = await handle.task()
        assert (task.status, task.delete_time) == (Status.SUCCESS, None)
    await mesh.retry("join", "j")  # it need not wait for its time any more
    async with working(mesh, "w1"):
        await status_is(mesh, "join", "j", Status.SUCCESS)

        async def gone() -> bool:
            return not [task async for task in mesh.find("part")]

        await eventually(gone, 30.0)


@pytest.mark.parametrize("published", [False, True], ids=["set_option", "publish"])
@pytest.mark.parametrize("fails", [False, True], ids=["SUCCESS", "FAIL"])
async def test_what_was_kept_for_ever_and_for_others_may_still_get_a_retention(
    mesh: TaskMesh, fails: bool, published: bool
) -> None:
    name = "retain_failed_ms" if fails else "retain_success_ms"
    shorter: dict[str, Any] = {name: 0}
    longer: dict[str, Any] = {name: 3_600_000}
    part, join = define(mesh)

    async def retain(key: str, retention: dict[str, Any]) -> None:
        if published:
            again = part.configure(update_existing_params=True, **retention)
            assert [(await again.publish(key, broken=fails)).updated for _ in range(2)] == [True, False]
        else:
            await mesh.set_option("part", key, **retention)

    waits = join.configure(start_time=datetime.now(UTC) + timedelta(hours=1), on_dependency_failure="run")
    kept = {
        key: await part.configure(retain_success_ms=None, retain_failed_ms=None).publish(key, broken=fails)
        for key in ("meanwhile", "afterwards")
    }
    handles = {key: await waits.configure(after=[each]).publish(key) for key, each in kept.items()}
    await drained(mesh)

    await retain("meanwhile", shorter)
    assert [(await each.task()).delete_time for each in kept.values()] == [None, None], "join still waits for them"
    for key in handles:
        await mesh.retry("join", key)  # it need not wait for its time any more
    await drained(mesh)
    ended = (await handles["afterwards"].task()).finish_time
    assert ended is not None
    assert (await kept["afterwards"].task()).delete_time is None, "it is kept for ever"

    await retain("afterwards", longer)
    if not published:
        assert (await kept["afterwards"].task()).delete_time == ended + timedelta(hours=1)
    async with working(mesh, "w1"):

        async def ends() -> dict[str, datetime | None]:
            return {task.key: task.delete_time async for task in mesh.find("part")}

        await eventually(lambda: _is({"afterwards": ended + timedelta(hours=1)}, ends()))


async def _is(wanted: object, found: Awaitable[object]) -> bool:
    return await found == wanted


async def test_a_handler_publishes_what_waits_for_others_with_its_success(mesh: TaskMesh) -> None:
    part, join = define(mesh)

    @mesh.task
    async def planner() -> None:
        task = current_task()
        await task.publish(part, "a")
        await task.publish(join.configure(after=[("part", "a")]), "j")

    await planner.publish("p")
    await drained(mesh)
    assert (await mesh.get("join", "j")).status is Status.SUCCESS


@pytest.mark.parametrize("plain", [False, True])
async def test_a_handler_hears_at_once_of_a_dependency_that_is_not_there(mesh: TaskMesh, plain: bool) -> None:
    part, join = define(mesh)
    await part.publish("a")
    await join.publish("old")
    waits_for = {"j": ("part", "a"), "lost": ("part", "nobody"), "behind": ("join", "j"), "old": ("part", "nobody")}
    refused: dict[str, str] = {}

    @mesh.task
    async def planner() -> None:
        for key, dependency in waits_for.items():
            try:
                await current_task().publish(join.configure(after=[dependency]), key)
            except TaskNotFound as error:
                refused[key] = str(error)

    @mesh.task
    def plain_planner() -> None:
        for key, dependency in waits_for.items():
            try:
                current_blocking_task().publish(join.configure(after=[dependency]), key)
            except TaskNotFound as error:
                refused[key] = str(error)

    handle = await (plain_planner if plain else planner).publish("p")
    await drained(mesh)
    assert refused == {"lost": refused["lost"]}
    assert "there is no task 'part' 'nobody'" in refused["lost"]
    assert len((await handle.task()).task_state.worker_states) == 1
    assert [(await mesh.get("join", key)).status for key in ("j", "behind", "old")] == [Status.SUCCESS] * 3
    with pytest.raises(TaskNotFound):
        await mesh.get("join", "lost")


async def test_in_a_transaction_a_handler_publishes_what_waits_for_what_it_publishes_with_the_session(
    mesh: TaskMesh,
) -> None:
    part, join = define(mesh)

    @mesh.task
    async def planner() -> None:
        task = current_task()
        async with task.transaction() as session:
            a = await part.configure(session=session).publish("a")
            await task.publish(join.configure(after=[a]), "j")

    await planner.publish("p")
    await drained(mesh)
    assert (await mesh.get("join", "j")).status is Status.SUCCESS


async def test_a_deleted_dependency_of_many_is_told_to_all_and_goes(mesh: TaskMesh) -> None:
    part, join = define(mesh)
    a = await part.configure(delay_ms=3_600_000).publish("a")
    handles = await join.configure(after=[a]).publish_many({str(n): {} for n in range(30)})
    await mesh.bulk.delete("name:part")
    for handle in handles:
        assert await handle.status() is Status.FAIL

    async def gone() -> bool:
        return not await mesh.connection.store.find({"_id": "part:a"}, {})

    async with working(mesh, "w1"):
        await eventually(gone, 30.0)


@pytest.mark.parametrize("how", ["run_again", "clean_failed", "replace_running", "cause retried"])
async def test_one_that_is_begun_anew_waits_for_what_stands_in_the_place_of_a_deleted_dependency(
    mesh: TaskMesh, how: str
) -> None:
    part, join = define(mesh)
    later = part.configure(delay_ms=3_600_000)
    both = [await later.publish("a"), await later.publish("b")]
    handle = await join.configure(after=both).publish("j")
    await mesh.cancel("part", "a")
    await mesh.delete("part", "b")
    assert await handle.status() is Status.FAIL
    await later.publish("b")  # another task of that name
    await mesh.retry("part", "a")
    if how != "cause retried":
        await mesh.cancel("part", "a")
        await mesh.retry("part", "a")
        again: Any = {how: True}
        await join.configure(**again).publish("j")
    await drained(mesh)
    await dependencies.sweep(mesh.store, 0)
    await waiting_for(mesh, "j")
    await mesh.retry("part", "b")
    await drained(mesh)
    assert await handle.result(5) == "joined"


@pytest.mark.parametrize(
    "how", [{"run_again": True}, {"clean_failed": True}, {"max_unexpected_retries": 1}], ids=lambda how: next(iter(how))
)
async def test_what_failed_because_of_one_comes_back_though_that_is_begun_anew_and_done_before_anybody_asks(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(Dependents, "sweep", no_sweep)
    broken = True

    @mesh.task(option=TaskOption(max_unexpected_retries=0, unexpected_retry_delay_ms=0))
    async def first() -> None:
        if broken:
            raise ValueError("broken")

    _, join = define(mesh)
    a = await first.publish("a")
    b = await join.configure(after=[a]).publish("b")
    c = await join.configure(after=[b]).publish("c")
    async with working(mesh, "w1"):
        assert (await finished(mesh, "join", "c")).status is Status.FAIL
        broken = False
        if "max_unexpected_retries" in how:
            await mesh.set_option("first", "a", **how)
        else:
            await first.configure(**how).publish("a")
        for handle in (b, c):
            await status_is(mesh, "join", handle.key, Status.SUCCESS)


def _told_after(finished: Task, woken: Task) -> timedelta:
    [entry] = woken.task_state.worker_states
    assert finished.finish_time is not None
    assert entry.start_time is not None
    return entry.start_time - finished.finish_time


async def test_whoever_records_a_success_tells_what_waits_for_it_and_leaves_that_to_no_sweep(mesh: TaskMesh) -> None:
    """Of several the quickest counts: a sweep answers no mark that is younger than a second."""
    part, join = define(mesh)

    @mesh.task
    async def parent() -> list[int]:
        task = current_task()
        return await task.results([await task.start(part.configure(delay_ms=300), f"of-{task.key}", n=7)])

    first = [await part.configure(delay_ms=300 + 50 * n).publish(f"p{n}") for n in range(5)]
    joins = [await join.configure(after=[each]).publish(each.key) for each in first]
    parents = [await parent.publish(f"{n}") for n in range(5)]
    async with working(mesh, "w1"):
        assert [await each.result(60) for each in joins] == ["joined"] * 5
        assert [await each.result(60) for each in parents] == [[7]] * 5
    by_after = [_told_after(await one.task(), await other.task()) for one, other in zip(first, joins, strict=True)]
    children = [await mesh.get("part", f"of-{n}") for n in range(5)]
    by_parent = [_told_after(one, await other.task()) for one, other in zip(children, parents, strict=True)]
    soon = timedelta(milliseconds=dependencies.MARKS_FOUND_AFTER_MS)
    assert (min(by_after) < soon, min(by_parent) < soon) == (True, True), (by_after, by_parent)


@pytest.mark.parametrize(("ended", "asked", "written"), [(False, 2, 2), (True, 3, 4)])
async def test_a_publication_by_itself_that_waits_costs_a_few_small_commands(
    mongo_uri: str, database: str, ended: bool, asked: int, written: int
) -> None:
    commands, count = Commands(sizes=True), 20
    client = AsyncMongoClient[Any](mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        part, join = define(mesh)
        await part.publish_many({f"{n}": {} for n in range(count)})
        if ended:
            await mesh.consumer(worker_id="w1").run(until_idle=True)
        await join.configure(after=[("part", "0")]).publish("first")  # from now on it knows the fleet
        before, sent = commands.by_name.copy(), commands.bytes_sent
        for n in range(count):
            await join.configure(after=[("part", f"{n}")]).publish(f"{n}")
        cost = commands.by_name - before
        # Whether all exist; how they stand once they name it; and whether what waits no more has to tell others.
        # The insert; that they name it; and if they have ended, that they are kept for it, and that it waits no more.
        # Marks are removed, and the fleet is read, now and then: on a slow machine, with each.
        assert cost["find"] <= asked * count + 5, cost
        assert cost["insert"] + cost["update"] <= (written + 1) * count, cost
        assert cost["aggregate"] <= count, cost
        # The whole rule has 38 kB. Only what has ended takes it.
        assert commands.bytes_sent - sent < count * (60_000 if ended else 10_000)
