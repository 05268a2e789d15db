"""The Node client beside real Python workers: what it publishes runs, what it waits for comes, what it signals wakes."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from taskmesh import Status, TaskFailed, TaskMesh, TaskOption, current_task
from tests.docs.examples import examples_in
from tests.waiting import eventually
from tests.working import working

pytestmark = pytest.mark.node

_PRELUDE = """
import { MongoClient } from 'mongodb';
import * as taskmesh from 'taskmesh-client';
const client = new MongoClient(process.env.TASKMESH_URI);
const mesh = new taskmesh.TaskMesh(client, { database: process.env.TASKMESH_DATABASE });
const say = (value) => console.log(JSON.stringify(value));
const failure = async (promise) => {
  try { return { value: await promise }; } catch ({ name, message, reasons }) { return { name, message, reasons }; }
};
"""
_END = "\nawait client.close();\n"
Said = list[Any]
RunNode = Callable[[str], Awaitable[str]]


@pytest.fixture
def run_node(node: Path, mongo_uri: str, database: str) -> RunNode:
    """Run a module in Node, where the client is installed under its name, and return what it printed."""

    async def run(module: str) -> str:
        environment = os.environ | {"TASKMESH_URI": mongo_uri, "TASKMESH_DATABASE": database}
        command = ["node", "--input-type=module", "-e", module]
        done = await anyio.run_process(command, check=False, cwd=node, env=environment)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    return run


async def said(run_node: RunNode, script: str) -> Said:
    """Run a script with a mesh, and return what it said."""
    return [json.loads(line) for line in (await run_node(_PRELUDE + script + _END)).splitlines()]


async def test_what_node_publishes_runs_in_python(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task(queue="images", option=TaskOption(max_timeouts=2))
    async def resize(path: str, width: int = 200, scale: float = 1.0) -> dict[str, Any]:
        return {"path": path, "width": width * scale, "priority": current_task().option.priority}

    async with working(mesh):
        first, again, many, mixed, values = await said(
            run_node,
            """
            const handle = await mesh.publish('resize', 'a', { path: 'a.png', width: 300 }, { priority: 5, delay_ms: 0,
              tags: ['x'], worker_timeout_ms: 3_000_000_000, unexpected_retry_backoff: 2 }, { repo_id: 7 });
            say([handle.created, await handle.result(60_000)]);
            say((await mesh.publish('resize', 'a', { path: 'other.png' })).created);
            const pairs = Array.from({ length: 1200 }, (_, n) => [String(n), { path: `${n}.png` }]);
            const handles = await mesh.publishMany('resize', pairs, { queue: 'bulk' });
            say(handles.every((each) => each.created));
            const mixed = await mesh.publishMany('resize', new Map([['7', { path: 'x' }], ['new', { path: 'y' }]]));
            say(mixed.map((each) => each.created));
            const results = await Promise.all(handles.map((each) => each.result(120_000)));
            say(results.every(({ path }, n) => path === `${n}.png`));
            """,
        )
    assert first == [True, {"path": "a.png", "width": 300, "priority": 5}]
    assert (again, many, mixed, values) == (False, True, [False, True], True)
    task = await mesh.get("resize", "a")
    option = task.task_option
    assert (task.queue, task.tags, task.extra, task.params) == (
        "images",
        ["x"],
        {"repo_id": 7},
        {"path": "a.png", "width": 300},
    )
    assert (option.max_timeouts, option.worker_timeout_ms, option.unexpected_retry_backoff) == (2, 3_000_000_000, 2.0)
    assert (await mesh.get("resize", "7")).queue == "bulk"


async def test_every_end_is_an_error_of_its_own(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task
    async def job(how: str) -> None:
        if how == "fail":
            raise TaskFailed("the printer is on fire")

    async with working(mesh):
        await job.configure(delay_ms=3_600_000).publish("cancelled", how="")
        await mesh.cancel("job", "cancelled")
        await job.configure(delay_ms=3_600_000).publish("waits", how="")
        found = await said(
            run_node,
            """
            say(await failure((await mesh.publish('job', 'ok', { how: 'end' })).result()));
            say(await failure((await mesh.publish('job', 'fails', { how: 'fail' })).result()));
            say(await failure((await mesh.publish('job', 'unfit', { who: 1 })).result()));
            say(await failure((await mesh.publish('job', 'bad', { how: '' }, { priority: 1.5 })).result()));
            say(await failure(mesh.result('job', 'cancelled')));
            const past = { expire_time: new Date(Date.now() - 1000) };
            say(await failure((await mesh.publish('job', 'late', { how: '' }, past)).result()));
            say(await failure(mesh.result('job', 'unheard of')));
            say(await failure(mesh.result('job', 'waits', 50)));
            """,
        )
    ok, fails, unfit, bad, cancelled, late, unknown, waits = found
    assert ok == {"value": None}
    assert fails["name"] == "TaskError"
    assert "the printer is on fire" in fails["reasons"][0]
    assert unfit["name"] == bad["name"] == "TaskError"
    assert "who" in unfit["message"]
    assert "priority=1.5" in bad["message"]
    assert [each["name"] for each in (cancelled, late, unknown, waits)] == [
        "TaskCancelled",
        "TaskExpired",
        "TaskNotFound",
        "ResultTimeout",
    ]


async def test_signals_wake_a_handler_and_are_sent_once(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task
    async def order() -> list[Any]:
        task = current_task()
        return [await task.wait_for("approved"), await task.wait_for("paid")]

    async with working(mesh):
        await order.publish("suspended")
        await eventually(lambda: _is_suspended(mesh))
        found = await said(
            run_node,
            """
            const suspended = { signal: (...about) => mesh.signal('order', 'suspended', ...about) };
            await suspended.signal('approved', { by: 'ann' }, 's1');
            await suspended.signal('approved', { by: 'bob' }, 's1');
            await suspended.signal('paid', 12, 's2');
            say(await mesh.result('order', 'suspended', 60_000));
            const early = await mesh.publish('order', 'early');
            await early.signal('paid');
            await early.signal('approved', 'now');
            say(await early.result(60_000));
            say(await failure(suspended.signal('approved', { by: 'ann' }, 's1')));
            say(await failure(suspended.signal('approved')));
            say(await failure(mesh.signal('order', 'unheard of', 'approved')));
            """,
        )
    assert found[:2] == [[{"by": "ann"}, 12], ["now", {}]]
    assert found[2] == {}, "it is known already"
    assert [each["name"] for each in found[3:]] == ["TaskFinished", "TaskNotFound"]


async def _is_suspended(mesh: TaskMesh) -> bool:
    return (await mesh.get("order", "suspended")).task_state.suspended_for is not None


async def test_a_mailbox_that_is_full_refuses(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task
    async def order() -> None: ...

    await order.configure(delay_ms=3_600_000).publish("k")
    large, more = await said(
        run_node,
        """
        await mesh.signal('order', 'k', 'e', 'x'.repeat(600_000));
        say(await failure(mesh.signal('order', 'k', 'e', 'x'.repeat(600_000))));
        say(await failure(mesh.signal('order', 'k', 'e', null)));
        """,
    )
    assert large["name"] == "TooManySignals"
    assert "null" in more["message"]
    assert len((await mesh.get("order", "k")).task_state.signals) == 1


async def test_a_key_is_free_when_its_retention_is_over(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task(option=TaskOption(retain_success_ms=3_600_000))
    async def job(n: int) -> int:
        return n

    async with working(mesh):
        for n in (1, 2):
            [[created, value]] = await said(
                run_node,
                f"const job = await mesh.publish('job', 'k', {{ n: {n} }}); say([job.created, await job.result(60_000)]);",
            )
            assert (created, value) == (True, n)
            # As if its time were over, and the server had not come round yet.
            long_ago = {"$set": {"delete_time": (await mesh.get("job", "k")).task_state.create_time}}
            await mesh.store.driver.collection("tasks").update_one({"_id": "job:k"}, long_ago)
    [created] = await said(run_node, "say((await mesh.publish('job', 'waits', {n: 1}, {delay_ms: 3600000})).created);")
    [again] = await said(run_node, "say((await mesh.publish('job', 'waits', {n: 1})).created);")
    assert (created, again) == (True, False)
    assert (await mesh.get("job", "waits")).status is Status.INIT


async def test_the_example_of_the_page_runs(mesh: TaskMesh, run_node: RunNode) -> None:
    @mesh.task
    async def resize(path: str) -> str:
        return path

    @mesh.task
    async def order(total: int) -> str:
        approval = await current_task().wait_for("approved")
        raise TaskFailed(f"{approval['by']} refused {total}")

    [example] = [each for each in examples_in("docs/protocol.md") if each.about == "node"]
    async with working(mesh):
        printed = (await run_node(example.text)).splitlines()
    assert printed[:2] == ["true a.png", "[ 'b.png', 'c.png' ]"]
    assert "ann refused 12" in "".join(printed[2:])
