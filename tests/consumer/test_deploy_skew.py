"""T45: while a deploy is half done, tasks that only the new code knows wait for it, uncharged, and one can see why."""

from __future__ import annotations

from taskmesh import Status, TaskMesh
from tests.waiting import eventually
from tests.working import working


async def test_t45_old_workers_never_claim_what_only_new_code_knows(mesh: TaskMesh, mongo_uri: str) -> None:
    @mesh.task
    async def old() -> str:
        return "old"

    async with (
        working(mesh, "old-worker") as consumer,
        TaskMesh(mongo_uri, database=mesh.store.driver.database.name) as later,
    ):

        @later.task
        async def new() -> str:
            return "new"

        handle = await new.publish("k")
        assert any("no live worker runs tasks named 'new'" in warning for warning in handle.warnings)
        # The old worker goes on with what it knows, and has looked for work again and again by then.
        for number in range(20):
            assert await (await old.publish(str(number))).result(timeout=60) == "old"
        await eventually(lambda: consumer.finished == 20)
        task = await handle.task()
        assert (task.status, task.task_state.worker_states, task.task_state.timeout_cnt) == (Status.INIT, [], 0)
        explanation = (await mesh.explain("new", "k"))[0]
        shut = [gate for gate in explanation.gates if not gate.open]
        assert [(gate.name, gate.reason) for gate in shut] == [
            ("worker runs such tasks", "does not run tasks named 'new' from queue 'default'")
        ]
        assert explanation.next_claim_time is None
        async with working(later, "new-worker"):
            assert await handle.result(timeout=60) == "new"
        task = await handle.task()
        assert [entry.worker_id for entry in task.task_state.worker_states] == ["new-worker"]
