"""Hooks: what a consumer's settings may decide before a claim, before a handler and after it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from taskmesh import (
    Consumer,
    Ending,
    Gate,
    InvalidOption,
    Snooze,
    Status,
    Task,
    TaskError,
    TaskFailed,
    TaskMesh,
    TaskOption,
)
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_on_claim_narrows_what_is_claimed_until_it_says_otherwise(mesh: TaskMesh, kind: str) -> None:
    at_most = 1

    def plain(consumer: Consumer) -> dict[str, Any]:
        assert consumer.worker_id == "w"
        return {"params.size": {"$lte": at_most}}

    async def in_the_loop(consumer: Consumer) -> dict[str, Any]:
        return plain(consumer)

    @mesh.task
    async def job(size: int) -> int:
        return size

    handles = await job.publish_many({f"k{size}": {"size": size} for size in (3, 1, 2)})
    async with working(mesh, "w", on_claim=plain if kind == "plain" else in_the_loop):
        assert await handles[1].result(60) == 1
        assert [await handle.status() for handle in handles] == [Status.INIT, Status.SUCCESS, Status.INIT]
        at_most = 2
        assert await handles[2].result(60) == 2
        at_most = 3
        assert await handles[0].result(60) == 3, "what was refused is tried again"


@pytest.mark.parametrize("wrong", [ValueError("no idea"), "priority > 5", {"$nonsense": 1}], ids=repr)
async def test_on_claim_that_returns_none_or_nonsense_or_raises_claims_nothing_this_round(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    asked: list[str] = []
    answer: Any = None

    def on_claim(_: Consumer) -> Any:
        asked.append("")
        if isinstance(answer, Exception):
            raise answer
        return answer

    @mesh.task
    async def job() -> int:
        return 1

    handle = await job.publish("k")
    async with working(mesh, on_claim=on_claim):
        await eventually(lambda: len(asked) >= 3)
        answer = wrong
        await eventually(
            lambda: "the hook 'on_claim' failed" in caplog.text or "unknown top level operator" in caplog.text
        )
        assert (await handle.task()).task_state.worker_states == []
        answer = {}
        assert await handle.result(60) == 1


async def test_hooks_of_the_mesh_are_those_of_every_consumer_that_has_none_of_its_own(mesh: TaskMesh) -> None:
    called: list[str] = []

    @mesh.task
    async def job() -> None: ...

    mesh.hooks(before=lambda _: called.append("mesh's before"), after=lambda *_: called.append("mesh's after"))
    await job.publish("k1")
    await mesh.consumer().run(until_idle=True)
    await job.publish("k2")
    await mesh.consumer(after=lambda *_: called.append("own after")).run(until_idle=True)
    assert called == ["mesh's before", "mesh's after", "mesh's before", "own after"]
    mesh.hooks()
    await job.publish("k3")
    await mesh.consumer().run(until_idle=True)
    assert len(called) == 4
    with pytest.raises(InvalidOption, match="the hook before must be a function, got 'log it'"):
        mesh.hooks(before="log it")  # type: ignore[arg-type]


async def test_before_and_after_see_the_task_and_how_it_ended(mesh: TaskMesh) -> None:
    seen: list[tuple[str, str, Any]] = []

    async def before(task: Task) -> None:
        [entry] = task.task_state.worker_states
        seen.append(("before", task.key, (task.params, entry.state)))

    def after(task: Task, ending: Ending) -> None:
        seen.append(("after", task.key, (ending.kind, ending.value, type(ending.error))))

    @mesh.task(option=ONCE)
    async def job(how: str) -> str:
        if how == "raise":
            raise ValueError("as asked")
        if how == "snooze":
            raise Snooze(delay_ms=60_000)
        return "done"

    await job.publish_many({how: {"how": how} for how in ("return", "raise", "snooze")})
    async with working(mesh, before=before, after=after):
        await eventually(lambda: len(seen) == 6)
    assert {(when, key): what for when, key, what in seen} == {
        ("before", "return"): ({"how": "return"}, "RUNNING"),
        ("before", "raise"): ({"how": "raise"}, "RUNNING"),
        ("before", "snooze"): ({"how": "snooze"}, "RUNNING"),
        ("after", "return"): ("succeeded", "done", type(None)),
        ("after", "raise"): ("failed", None, ValueError),
        ("after", "snooze"): ("snoozed", None, Snooze),
    }


async def test_what_before_raises_is_the_execution_s_failure_and_the_handler_does_not_start(mesh: TaskMesh) -> None:
    started: list[str] = []
    after_all: list[str] = []

    def before(task: Task) -> None:
        raise TaskFailed("not today") if task.key == "final" else ValueError("no room")

    def after(task: Task, ending: Ending) -> None:
        after_all.append(f"{task.key} {ending.kind}")

    @mesh.task(option=ONCE)
    async def job() -> None:
        started.append("")

    handles = await job.publish_many({"k": {}, "final": {}})
    async with working(mesh, before=before, after=after):
        with pytest.raises(TaskError, match="ValueError: no room"):
            await handles[0].result(60)
        with pytest.raises(TaskError, match="not today"):
            await handles[1].result(60)
    assert started == []
    assert sorted(after_all) == ["final failed", "k failed"]


async def test_what_after_raises_is_logged_and_changes_nothing(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    async def after(_: Task, __: Ending) -> None:
        raise RuntimeError("the hook is broken")

    @mesh.task
    async def job() -> int:
        return 7

    handle = await job.publish("k")
    async with working(mesh, after=after) as consumer:
        assert await handle.result(60) == 7
        await eventually(lambda: not consumer.running)
    assert (await finished(mesh, "job", "k")).status is Status.SUCCESS
    [record] = [record for record in caplog.records if "the hook 'after' failed" in record.message]
    assert record.levelno == logging.ERROR


async def test_explain_tells_that_the_hook_is_asked_and_what_it_said_last(mesh: TaskMesh) -> None:
    says: Any = {"params.size": {"$lte": 1}}

    @mesh.task
    async def job(size: int) -> None: ...

    await job.publish("k", size=2)

    async def gate() -> Gate | None:
        explained = (await mesh.explain("job", "k", "w"))[0]
        found = next((gate for gate in explained.gates if gate.name == "on_claim"), None)
        return (
            found if found is not None and repr(says)[:10].strip("{'") in found.reason and explained.claimable else None
        )

    async def claims_nothing() -> bool:
        explained = (await mesh.explain("job", "k", "w"))[0]
        return not explained.claimable and {gate.name for gate in explained.gates if not gate.open} == {"on_claim"}

    async with working(mesh, "w", on_claim=lambda _: says), working(mesh, "plain", names=["job"], queues=["other"]):
        told = await eventually(gate, what="explain tells of the filter")
        assert "whether it would take this task is not checked here" in told.reason
        says = None
        await eventually(claims_nothing, what="explain tells that nothing is claimed")
        assert "on_claim" not in {gate.name for gate in (await mesh.explain("job", "k", "plain"))[0].gates}
