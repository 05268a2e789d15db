"""A task goes on in another queue as the same document, uncharged, and keeps its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from taskmesh import InvalidOption, InvalidParams, Next, Status, TaskMesh, TaskOption, current_task
from tests.flows.process_handlers import probe_elsewhere


@dataclass
class Film:
    path: str
    codec: str


async def drained(mesh: TaskMesh) -> None:
    await mesh.consumer(worker_id="w1").run(until_idle=True)


async def test_a_task_goes_through_its_queues_each_with_a_handler_of_its_own(mesh: TaskMesh) -> None:
    attempts: list[int] = []

    @mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=0))
    async def video(path: str) -> Film | Next:
        if current_task().attempt == 1:
            raise ValueError("the first try")
        return Next(queue="probe", params={"path": path, "n": 1})

    @video.on_queue("probe")
    def probe(path: str, n: int) -> None:
        raise Next(queue="encode", params={"path": path, "codec": f"av{n}"})

    @video.on_queue("encode")
    async def encode(path: str, codec: str) -> Film:
        attempts.append(current_task().attempt)
        return Film(path, codec)

    handle = await video.publish("v", path="$a")
    await drained(mesh)
    assert await handle.result(5) == Film("$a", "av1")
    task = await handle.task()
    assert [(stage.queue, stage.params) for stage in task.stages] == [
        ("default", {"path": "$a"}),
        ("probe", {"path": "$a", "n": 1}),
    ]
    assert (task.queue, task.params, attempts) == ("encode", {"path": "$a", "codec": "av1"}, [1])
    assert [entry.state for entry in task.task_state.worker_states] == ["SUCCESS"]
    assert task.task_state.lost_cnt == task.task_state.timeout_cnt == 0


async def test_without_a_handler_of_the_queue_and_without_params_the_task_s_own_run_on(mesh: TaskMesh) -> None:
    in_a_process = mesh.task(probe_elsewhere, run="process")

    @mesh.task
    async def count(n: int = 3) -> int:
        if not (await mesh.get("count", current_task().key)).stages:
            raise Next(queue="later")
        return n

    handles: list[Any] = [await count.publish("k", n=5), await in_a_process.publish("k", n=1)]
    await drained(mesh)
    assert [await handle.result(5) for handle in handles] == [5, 2]
    assert [(await handle.task()).queue for handle in handles] == ["later", "other"]


async def test_what_cannot_be_next_is_refused(mesh: TaskMesh) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def wrong(queue: str, params: dict[str, Any] | None = None) -> None:
        raise Next(queue=queue, params=params)

    for key, settings, said in (
        ("queue", {"queue": ""}, "queue"),
        ("params", {"queue": "other", "params": {"nothing": 1}}, "there is no parameter 'nothing'"),
    ):
        handle = await mesh.publish("wrong", key, settings)
        await drained(mesh)
        task = await handle.task()
        assert (task.status, task.stages) == (Status.FAIL, [])
        assert said in task.fail_reasons[0]
    with pytest.raises(InvalidParams, match="must be a mapping"):
        Next(queue="other", params=[1])  # type: ignore[arg-type]  # as those do who do not check
    with pytest.raises(InvalidOption):
        Next(queue="")
    with pytest.raises(InvalidOption, match="already"):
        wrong.on_queue("twice")(wrong.on_queue("twice")(lambda: None))
