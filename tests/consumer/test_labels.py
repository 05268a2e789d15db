"""Tasks that need something of their worker, and workers that say what they have."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, TaskHandle, TaskMesh, current_task
from taskmesh.model.worker import Claimant
from taskmesh.store.find import ScanRange, Sort, scan
from taskmesh.store.rules import NEVER
from tests.cli.shell import Shell
from tests.waiting import eventually
from tests.working import parts_of, working


async def who() -> str:
    return current_task().worker_id


async def test_only_a_worker_with_the_labels_runs_the_task(mesh: TaskMesh) -> None:
    train = mesh.task(who, name="train", needs={"gpu": True, "host": socket.gethostname()})
    easy = mesh.task(who, name="easy")
    async with working(mesh, "without", labels={"gpu": "true"}), working(mesh, "one", labels={"gpu": 1}):
        handle = await train.publish("k")
        [warning] = handle.warnings
        assert "gpu=true" in warning
        assert await (await easy.publish("k")).result(60) in ("without", "one"), "others pass it"
        [why, _] = sorted(await mesh.explain("train", "k"), key=lambda each: each.worker_id)
        assert not why.claimable
        [gate] = [gate for gate in why.gates if not gate.open]
        assert gate.name == "labels"
        assert "gpu=true" in gate.reason
        assert "gpu=1" in gate.reason
        async with working(mesh, "with", labels={"gpu": True, "more": [1]}):
            assert await handle.result(60) == "with"
            keys = (f"another {n}" for n in count())

            async def is_published_without_warnings() -> bool:
                return not (await train.publish(next(keys))).warnings

            await eventually(is_published_without_warnings, what="who publishes knows the worker")
            assert await (await train.configure(needs={"more": [1]}).publish("other")).result(60) == "with"
    assert (await mesh.get("train", "k")).needs == {"gpu": True, "host": socket.gethostname()}
    assert {worker.worker_id: worker.labels.get("gpu") for worker in await mesh.workers()} == {
        "with": True,
        "without": "true",
        "one": 1,
    }


async def test_a_thousand_that_nobody_here_can_run_hold_up_nobody(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    await job.configure(needs={"gpu": True}, priority=9).publish_many({f"gpu{n}": {} for n in range(1_000)})
    handle = await job.publish("mine")
    await mesh.consumer(labels={"gpu": "no"}).run(until_idle=True)
    assert await handle.status() is Status.SUCCESS
    assert (await mesh.get("job", "gpu0")).status is Status.INIT


async def test_a_scan_reads_no_backlog_that_is_for_others(mesh: TaskMesh) -> None:
    """Neither whoever lacks the labels reads what needs them, nor whoever has them what is for anybody."""

    @mesh.task
    async def job() -> None: ...

    await job.configure(needs={"gpu": True}, priority=9).publish_many({f"gpu{n}": {} for n in range(5)})
    await job.configure(needs={"zone": "a", "gpu": True}).publish("both")
    await job.configure(specific_worker_ids=["w"], needs={"gpu": True}).publish("named")
    await job.publish("easy")
    store = mesh.connection.store
    what = ScanRange(["job"], ["default"], None, datetime.now(UTC) + timedelta(minutes=1))

    async def read(labels: dict[str, Any], sort: Sort) -> list[str]:
        page = await scan(store, Claimant.labelled("me", labels), what, 100, sort)
        return [row.id.removeprefix("job:") for row in page.rows if row.claim_time != NEVER]

    gpus = [f"gpu{n}" for n in range(5)]
    assert await read({"zone": "a"}, "waiting") == ["easy"] == await read({"gpu": True}, "waiting")
    assert await read({"zone": "b"}, "labelled") == []
    assert await read({"zone": "a"}, "labelled") == [], "it needs all of them"
    assert await read({"gpu": True}, "labelled") == gpus
    assert await read({"gpu": True, "zone": "a"}, "labelled") == [*gpus, "both"]


async def test_workers_with_the_labels_divide_a_backlog_among_them(mesh: TaskMesh) -> None:
    @mesh.task
    async def job() -> None: ...

    await mesh.pause("default")
    await job.configure(needs={"gpu": True}).publish_many({str(n): {} for n in range(600)})
    with_them, without = {"labels": {"gpu": True}}, dict[str, Any]()
    async with AsyncExitStack() as fleet:
        consumers = [
            await fleet.enter_async_context(working(mesh, f"w{n}", concurrency=20, **settings))
            for n, settings in enumerate([with_them, with_them, without, without])
        ]
        registrations = [parts_of(consumer).registration for consumer in consumers]
        await eventually(lambda: all(len(r.fleet) == 4 for r in registrations), what="each knows all others")
        await mesh.resume("default")
        await eventually(lambda: sum(consumer.finished for consumer in consumers) == 600)
    ran = [consumer.finished for consumer in consumers]
    assert min(ran[:2]) >= 150, ran
    assert ran[2:] == [0, 0]
    assert sum(parts_of(consumer).candidates.tried_in_vain for consumer in consumers) <= 60


async def test_what_needs_labels_and_is_for_several_runs_on_as_many_of_those_who_have_them(mesh: TaskMesh) -> None:
    job = mesh.task(who, name="job", needs={"gpu": True})
    async with AsyncExitStack() as fleet:
        for n in range(4):
            labels = {"gpu": True} if n < 3 else {}
            await fleet.enter_async_context(working(mesh, f"w{n}", labels=labels, listen=False))
        handle = await job.configure(concurrent_worker_cnt=3).publish("k")
        await eventually(lambda: _is_done(handle), what="three have run it")
    assert set(await handle.results()) == {"w0", "w1", "w2"}


async def _is_done(handle: TaskHandle[Any]) -> bool:
    return await handle.status() is Status.SUCCESS


async def test_what_a_worker_registers_is_needed_by_tasks_published_elsewhere(mesh: TaskMesh) -> None:
    mesh.task(who, name="train", needs={"gpu": True})
    async with working(mesh, "w"), TaskMesh(mesh.connection.client, database=mesh.connection.database) as elsewhere:
        await elsewhere.publish("train", "k")
        assert (await mesh.get("train", "k")).needs == {"gpu": True}


BAD: list[Any] = ["gpu", [1], {7: 1}, {"": 1}, {"a=b": 1}, {"a": object()}, {"a": float("nan")}, {"a": "x" * 2_000}]


async def test_what_is_no_label_is_refused(mesh: TaskMesh) -> None:
    for bad in BAD:
        with pytest.raises(InvalidOption, match="labels"):
            mesh.consumer(labels=bad)
        with pytest.raises(InvalidOption, match="needs"):
            mesh.task(who, name="x", needs=bad)
        with pytest.raises(InvalidOption, match="needs"):
            await mesh.publish("x", "k", needs=bad)


def test_a_supervisor_s_id_names_all_its_children(taskmesh: Shell) -> None:
    labels = ("--label", "gpu=true", "--label", "zone=a")
    supervisor = taskmesh.start("worker", "app:mesh", "--worker-id", "node1", "--processes", "2", *labels)
    supervisor.says("all 2 workers are ready")
    found = {w["worker_id"]: w["labels"] for w in taskmesh.done("workers", "--live", "--json").json}
    told = {"gpu": True, "zone": "a", "worker": "node1", "host": socket.gethostname()}
    assert found == {"node1-1": told, "node1-2": told}
    both = ("--option", 'specific_worker_ids=["node1"]', "--option", "concurrent_worker_cnt=2")
    published = taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}', *both, "--json").json
    assert published["warnings"] == []
    taskmesh.until("SUCCESS", "add", "k")
    task = taskmesh.done("show", "add", "k", "--json").json
    assert {entry["worker_id"] for entry in task["task_state"]["worker_states"]} == {"node1-1", "node1-2"}
    assert supervisor.stop() == 0
