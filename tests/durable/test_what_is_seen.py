"""What people see of a task that has steps: `show`, the page, REST, the command for signals."""

from __future__ import annotations

import asyncio

from taskmesh import Status, TaskMesh, current_task
from tests.cli.shell import Shell
from tests.durable.test_suspension import suspended
from tests.web.conftest import browser
from tests.working import status_is, working


async def _waiting(mesh: TaskMesh) -> None:
    """A task with a step done, and another that it waits for."""

    @mesh.task
    async def order() -> str:
        task = current_task()
        await task.step("charge", lambda: {"cents": 500})
        approval = await task.wait_for("approved")
        return str(approval["by"])

    await order.publish("7")
    async with working(mesh, "w1"):
        await suspended(mesh, "order", "7")


async def test_the_page_and_rest_tell_the_steps_and_what_is_waited_for_and_take_signals(mesh: TaskMesh) -> None:
    await _waiting(mesh)
    async with browser(mesh) as client:
        page = (await client.get("/task", params={"name": "order", "key": "7"})).text
        assert "waits for the signal" in page
        assert "charge" in page
        assert "500" in page
        refused = await client.post("/api/v1/tasks/order/7/signals/approved", json={"payload": None})
        assert refused.status_code == 422
        assert "payload=None" in refused.text
        for _ in range(2):
            body = {"payload": {"by": "ann"}, "signal_id": "a"}
            assert (await client.post("/api/v1/tasks/order/7/signals/approved", json=body)).status_code == 200
        task = (await client.get("/api/v1/tasks/order/7")).json()
        assert [(step["name"], step["value"]) for step in task["task_state"]["steps"]][1:] == [
            ("approved", {"by": "ann"})
        ]
        assert task["task_state"]["signals"] == [], "what is waited for is in the record of the wait at once"
        assert (await client.post("/api/v1/tasks/order/7/signals/later", json={})).status_code == 200
        task = (await client.get("/api/v1/tasks/order/7")).json()
        assert [signal["event"] for signal in task["task_state"]["signals"]] == ["later"]
        assert (await client.post("/api/v1/tasks/order/none/signals/x", json={})).status_code == 404
    async with working(mesh, "w1"):
        await status_is(mesh, "order", "7", Status.SUCCESS)
    async with browser(mesh) as client:
        late = await client.post("/api/v1/tasks/order/7/signals/approved", json={})
        assert late.status_code == 409


async def test_the_command_line_shows_steps_and_sends_signals(mesh: TaskMesh, taskmesh: Shell) -> None:
    await _waiting(mesh)
    shown = await asyncio.to_thread(taskmesh, "show", "order", "7")
    assert "waits for the signal 'approved'" in shown.out
    assert "charge" in shown.out
    sent = await asyncio.to_thread(taskmesh, "signal", "order", "7", "approved", '{"by": "ann"}')
    assert sent.out.strip() == "order 7: signal approved sent"
    wrong = await asyncio.to_thread(taskmesh, "signal", "order", "7", "approved", "{by: ann}")
    assert wrong.status == 2
    async with working(mesh, "w1"):
        await status_is(mesh, "order", "7", Status.SUCCESS)
    shown = await asyncio.to_thread(taskmesh, "explain", "order", "7")
    assert shown.status == 0
