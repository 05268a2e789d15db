"""Tasks that need something of their worker, and workers that say what they have."""

from __future__ import annotations

import socket
from itertools import count
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, TaskMesh, current_task
from tests.cli.shell import Shell
from tests.waiting import eventually
from tests.working import working


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
