"""A flow is published as a whole or not at all, and followed as one thing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import (
    InvalidOption,
    InvalidParams,
    Status,
    TaskError,
    TaskFailed,
    TaskFinished,
    TaskMesh,
    TaskNotFound,
    TaskOption,
)
from taskmesh.client.definition import TaskDefinition
from taskmesh.store import flows as verbs
from tests.faults import failing_commands
from tests.waiting import eventually
from tests.working import status_is, working


def define(mesh: TaskMesh) -> tuple[TaskDefinition[Any, Any], TaskDefinition[Any, Any]]:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def load(n: int = 0, broken: bool = False) -> int:
        if broken:
            raise TaskFailed("broken")
        return n

    @mesh.task
    async def merge(after: int = 0) -> str:
        return f"merged {after}"

    return load, merge


async def is_opened(mesh: TaskMesh, key: str) -> bool:
    """Whether all gates of the flow are noted to be open."""
    flow = await verbs.read(mesh.store, key)
    return flow is not None and flow["state"] == "opened"


async def drained(mesh: TaskMesh) -> None:
    await mesh.consumer(worker_id="w1").run(until_idle=True)


async def test_a_flow_runs_in_its_order_and_tells_how_far_it_is(mesh: TaskMesh) -> None:
    load, merge = define(mesh)
    async with mesh.flow("import") as flow:
        parts = [flow.add(load, f"part-{n}", n=n) for n in range(20)]
        end = flow.add(merge, "merge", after=parts, params={"after": 7})
        with pytest.raises(TaskNotFound):
            await parts[0].task()
    assert all(part.created for part in parts)
    status = await mesh.flow_status("import")
    assert (status.counts, status.progress, status.finished) == ({"INIT": 21}, 0.0, False)
    assert set(status.edges) == {(("load", f"part-{n}"), ("merge", "merge")) for n in range(20)}
    assert status.last == [("merge", "merge")]
    await drained(mesh)
    assert await flow.result(5) == {("merge", "merge"): "merged 7"}
    again = await end.flow()
    assert (again.key, again.counts, again.progress) == ("import", {"SUCCESS": 21}, 1.0)
    async with mesh.flow("import") as same:
        same.add(load, "part-0", n=0)
    assert (await same.status()).counts == {"SUCCESS": 21}
    with pytest.raises(TaskFinished, match="'import' is finished"):
        async with mesh.flow("import") as other:
            other.add(load, "new")


async def test_d13_an_empty_flow_is_done_at_once(mesh: TaskMesh) -> None:
    async with mesh.flow("empty") as flow:
        pass
    assert await flow.result(5) == {}
    assert (await flow.status()).progress == 1.0


@pytest.mark.parametrize("others", [[], ["new"]])
async def test_a_flow_of_which_nothing_is_left_may_be_published_again(mesh: TaskMesh, others: list[str]) -> None:
    load, _ = define(mesh)

    async def publish(*keys: str, n: int) -> dict[tuple[str, str], Any]:
        async with mesh.flow("daily") as flow:
            parts = [flow.add(load, key, n=n) for key in keys]
        assert all(part.created for part in parts)
        await drained(mesh)
        return await flow.result(5)

    assert await publish("a", "b", n=1) == {("load", "a"): 1, ("load", "b"): 1}
    mesh.store.move_on(timedelta(days=2))  # past the retention of both
    assert await publish("a", *others, n=2) == {("load", key): 2 for key in ("a", *others)}


async def test_the_same_flow_again_is_one_though_what_its_members_waited_for_is_gone(mesh: TaskMesh) -> None:
    load, merge = define(mesh)
    before = await load.publish("before")

    async def publish(*keys: str) -> None:
        async with mesh.flow("f") as flow:
            flow.add(merge, "m", after=[before])
            for key in keys:
                flow.add(load.configure(delay_ms=3_600_000), key)

    await publish("late")
    await drained(mesh)
    await mesh.delete("load", "before")
    await publish("late")
    await publish("late", "later")
    assert (await mesh.flow_status("f")).counts == {"SUCCESS": 1, "INIT": 2}


async def test_d11_nothing_of_a_flow_runs_before_all_of_it_is_there_and_the_same_again_completes_it(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, merge = define(mesh)

    async def publish(parts: int) -> None:
        async with mesh.flow("f") as flow:
            flow.add(merge, "m", after=[flow.add(load, str(n)) for n in range(parts)])

    async def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verbs, "seal", die)
        with pytest.raises(KeyboardInterrupt):
            await publish(10)
    assert not (await mesh.flow_status("f")).published
    async with working(mesh, "w1") as consumer:
        other = await load.publish("other")
        await other.result(20)  # while the worker works
        await eventually(lambda: consumer._worker is not None and consumer._worker.scanner.scans > 3)
        assert (await mesh.flow_status("f")).counts == {"INIT": 11}
        [explained] = await mesh.explain("load", "0")
        assert [gate.name for gate in explained.gates if not gate.open] == ["flow"]
        with monkeypatch.context() as patch:  # sealed, and dead before the gates are opened: a worker opens them
            patch.setattr(verbs, "open_members", die)
            with pytest.raises(KeyboardInterrupt):
                await publish(20)
        await status_is(mesh, "merge", "m", Status.SUCCESS)
    status = await mesh.flow_status("f")
    assert (status.counts, len(status.edges)) == ({"SUCCESS": 21}, 10)  # the join was there: it is joined, not changed


async def test_a_member_that_somebody_holds_keeps_only_itself_waiting(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, _ = define(mesh)
    tasks = mesh.store.driver.collection(mesh.store.tasks)
    seal = verbs.seal
    async with mesh.store.driver.session() as session, working(mesh, "w1"):
        await mesh.store.driver.start_transaction(session)

        async def sealed_and_held(*arguments: Any) -> None:
            await seal(*arguments)
            await tasks.update_one({"_id": "load:0"}, {"$set": {"note": "mine"}}, session=session)

        with monkeypatch.context() as patch:
            patch.setattr(verbs, "seal", sealed_and_held)
            async with mesh.flow("f") as flow:
                parts = [flow.add(load, str(n), n=n) for n in range(5)]
        assert [await part.result(20) for part in parts[1:]] == [1, 2, 3, 4]
        assert (await parts[0].task()).status is Status.INIT
        await session.abort_transaction()
        assert await parts[0].result(20) == 0
        await eventually(lambda: is_opened(mesh, "f"))


async def test_d12_members_that_exist_already_are_joined(mesh: TaskMesh) -> None:
    load, merge = define(mesh)
    await load.publish_many({f"s{n}": {} for n in range(5)})
    await load.publish_many({f"f{n}": {"broken": True} for n in range(5)})
    await drained(mesh)
    async with mesh.flow("other") as other:
        for n in range(5):
            other.add(load, f"o{n}")
    keys = [f"{kind}{n}" for kind in "son" for n in range(5)]
    async with mesh.flow("good") as flow:
        flow.add(merge, "good", after=[flow.add(load, key) for key in keys])
    async with mesh.flow("bad") as bad:
        bad.add(merge, "bad", after=[bad.add(load, key) for key in (*keys, "f0", "f1")])
    await drained(mesh)
    assert await flow.result(5) == {("merge", "good"): "merged 0"}
    with pytest.raises(TaskError, match=r"'load' 'f[01]'"):
        await bad.result(5)


@pytest.mark.parametrize(
    "setting",
    [
        *({flag: True} for flag in ("update_existing_params", "not_update_running", "clean_success", "clean_failed")),
        *({"run_again": True}, {"replace_running": True}, {"debounce_ms": 5}, {"throttle_ms": 5}),
    ],
    ids=lambda setting: next(iter(setting)),
)
async def test_what_would_change_a_member_that_exists_is_refused(mesh: TaskMesh, setting: Any) -> None:
    load, _ = define(mesh)
    handle = await load.publish("x", n=1)
    await drained(mesh)
    before = await handle.task()
    with pytest.raises(InvalidOption, match=f"{next(iter(setting))} was set: a flow joins"):
        async with mesh.flow("f") as flow:
            flow.add(load.configure(**setting), "x", n=2)
    assert await handle.task() == before


async def test_cancel_and_retry_of_a_flow(mesh: TaskMesh) -> None:
    load, merge = define(mesh)
    async with mesh.flow("f") as flow:
        good, bad = flow.add(load, "good"), flow.add(load, "bad", broken=True)
        flow.add(merge, "m", after=[good, bad])
    await drained(mesh)
    assert (await flow.status()).counts == {"SUCCESS": 1, "FAIL": 2}
    first = (await good.task()).task_state.create_time
    await load.configure(update_existing_params=True).publish("bad", broken=False)
    assert (await (await mesh.flow_status("f")).retry()).counts == {"SUCCESS": 1, "INIT": 2}
    await drained(mesh)
    assert (await flow.status()).counts == {"SUCCESS": 3}
    assert (await good.task()).task_state.create_time == first
    async with mesh.flow("g") as flow:
        flow.add(merge, "m2", after=[flow.add(load.configure(delay_ms=3_600_000), "late")])
    assert (await flow.cancel()).counts == {"CANCELLED": 2}


@pytest.mark.parametrize("fault", [{"errorCode": 50}, {"closeConnection": True}], ids=["over the deadline", "cut off"])
async def test_verbs_of_a_flow_are_tried_again_while_the_database_falters(
    mesh: TaskMesh, mongo_uri: str, fault: Any
) -> None:
    load, _ = define(mesh)
    async with mesh.flow("f") as flow:
        flow.add(load, "x")
    async with failing_commands(mongo_uri, ["update"], times=1, **fault) as have_failed:
        assert (await flow.cancel()).counts == {"CANCELLED": 1}
        await have_failed()
    async with failing_commands(mongo_uri, ["update"], times=1, **fault) as have_failed:
        assert (await flow.retry()).counts == {"INIT": 1}
        await have_failed()


@pytest.mark.parametrize(
    ("members", "error", "said"),
    [
        (
            [("load", "x", {"after": [("merge", "m")]}), ("merge", "m", {"after": [("load", "x")]})],
            InvalidOption,
            "'load' 'x' waits for 'merge' 'm' waits for 'load' 'x'",
        ),
        ([("merge", "m", {"after": [("load", "nobody")]})], TaskNotFound, "'load' 'nobody'"),
        ([("load", "x", {}), ("load", "x", {})], InvalidOption, "twice"),
        ([("load", "x", {"n": "many"})], InvalidParams, "'n'='many'"),
        ([("unknown", "x", {})], InvalidOption, "'unknown'"),
    ],
)
async def test_what_is_no_flow_is_refused_and_nothing_is_published(
    mesh: TaskMesh, members: list[tuple[str, str, Any]], error: type[Exception], said: str
) -> None:
    define(mesh)

    async def publish() -> None:
        async with mesh.flow("f") as flow:
            for name, key, settings in members:
                flow.add(name, key, **settings)

    with pytest.raises(error, match=said):
        await publish()
    with pytest.raises(TaskNotFound):
        await mesh.flow_status("f")
    assert [task async for task in mesh.find()] == []


async def test_flows_of_which_nothing_is_left_are_removed_many_at_a_time(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, _ = define(mesh)
    left_of = verbs._left_of

    async def left_when_one_is_published_again(*args: Any) -> set[str]:
        monkeypatch.setattr(verbs, "_left_of", left_of)
        await verbs.begin(store, "again", ["load:new"])
        return await left_of(*args)

    many = 120
    for key, size in (("last is left", 30), ("first is left", 5), ("again", 30)):
        async with mesh.flow(key) as flow:
            for n in range(size):
                flow.add(load, f"{key}-{n}")
    store = mesh.store
    of_flows, of_tasks = store.driver.collection(store.flows), store.driver.collection(store.tasks)
    await of_tasks.delete_many({"key": {"$ne": "first is left-0"}, "_id": {"$ne": "load:last is left-29"}})
    past = {"$set": {"check_time": datetime.now(UTC) - timedelta(seconds=1)}}
    await of_flows.update_many({}, past)
    template = await of_flows.find_one({"_id": "again"}) or {}
    await of_flows.insert_many([template | {"_id": f"gone-{n}"} for n in range(many)])
    monkeypatch.setattr(verbs, "_left_of", left_when_one_is_published_again)
    for _ in range(4):
        await verbs.sweep(store)
    kept = {flow["_id"]: flow["check_time"] for flow in await of_flows.find({}).to_list(None)}
    assert kept.keys() == {"last is left", "first is left", "again"}
    assert kept["again"] - kept["first is left"] > timedelta(hours=1), "the time that its publisher has"
    await of_tasks.delete_many({})
    await verbs.sweep(store)
    assert await of_flows.count_documents({}) == 3, "checked again in an hour"
    await of_flows.update_many({}, past)
    await verbs.sweep(store)
    assert await of_flows.count_documents({}) == 0
