"""Dead letters: what FAILs moves to the queue that its option names, in the same write, and back to its own with a retry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from taskmesh import InvalidOption, Status, Task, TaskError, TaskFailed, TaskHandle, TaskMesh, TaskOption
from tests.processes.fleet import Fleet
from tests.waiting import eventually
from tests.working import working

DEAD = TaskOption(on_fail="dead", max_unexpected_retries=1, unexpected_retry_delay_ms=0)


def where(task: Task) -> tuple[Status, str, str | None]:
    """Return how it stands, where, and where it came from."""
    return task.status, task.queue, task.task_state.home


async def test_what_fails_for_good_stands_in_the_queue_of_the_dead_and_redrive_sends_it_home(mesh: TaskMesh) -> None:
    broken, attempts = True, 0

    @mesh.task(queue="mail", option=DEAD)
    async def send(to: str) -> str:
        nonlocal attempts
        attempts += 1
        if broken:
            raise RuntimeError("the provider is down")
        return to

    @mesh.task(queue="mail", option=DEAD)
    async def refuse() -> None:
        raise TaskFailed("never")

    letters = [await send.publish(f"k{n}", to="ada") for n in range(3)]
    elsewhere = await send.configure(queue="news").publish("n", to="bob")
    refused = await refuse.publish("r")
    published: list[TaskHandle[Any]] = [*letters, elsewhere, refused]
    async with working(mesh, "w1"):
        for handle in published:
            with pytest.raises(TaskError):
                await handle.result(60)
        assert attempts == 8, "each is tried twice, and not once more where it stands then"
        assert [where(await handle.task()) for handle in letters] == [(Status.FAIL, "dead", "mail")] * 3
        assert where(await elsewhere.task()) == (Status.FAIL, "dead", "news")
        assert where(await refused.task()) == (Status.FAIL, "dead", "mail")
        task = await letters[0].task()
        assert (task.params, len(task.task_state.worker_states)) == ({"to": "ada"}, 2)
        [queue] = [each for each in await mesh.queues.all() if each.queue == "dead"]
        assert (queue.dead_letters, queue.waiting) == (5, 0)
        told = [each.found for each in await mesh.inspect.doctor() if each.subject == "dead letters"]
        assert told == ["5 in 'dead'"]
        assert (await mesh.bulk.redrive("dead", dry_run=True)).matched == 5
        broken = False
        done = await mesh.bulk.redrive("dead", by="ann")
        assert (done.action, done.matched, done.done) == ("redrive", 5, 5)
        for letter in (*letters, elsewhere):
            await letter.result(60)
    assert [where(await handle.task()) for handle in letters] == [(Status.SUCCESS, "mail", None)] * 3
    assert where(await elsewhere.task()) == (Status.SUCCESS, "news", None)
    assert where(await refused.task()) == (Status.FAIL, "dead", "mail"), "it has failed again"


async def test_a_redrive_can_be_undone_and_one_letter_goes_home_by_any_way_back(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail", option=DEAD.changed(max_unexpected_retries=0))
    async def send() -> None:
        raise RuntimeError("no")

    handles = await send.publish_many({key: {} for key in ("a", "b", "c", "d")})
    await mesh.consumer().run(until_idle=True)
    done = await mesh.bulk.redrive("dead")
    assert {where(await handle.task()) for handle in handles} == {(Status.INIT, "mail", None)}
    assert done.id is not None
    await mesh.bulk.undo(done.id)
    assert {where(await handle.task()) for handle in handles} == {(Status.FAIL, "dead", "mail")}
    await mesh.retry("send", "a")
    await send.configure(run_again=True).publish("b")
    await send.configure(clean_failed=True).publish("c")
    await send.configure(run_again=True, queue="news").publish("d")
    found = [where(await handle.task()) for handle in handles]
    assert found == [*[(Status.INIT, "mail", None)] * 3, (Status.INIT, "news", None)]


async def test_the_option_moves_what_has_failed_already_and_takes_it_back(mesh: TaskMesh) -> None:
    @mesh.task(queue="mail", option=TaskOption(max_unexpected_retries=0))
    async def send() -> None:
        raise RuntimeError("no")

    handle = await send.publish("k")
    await mesh.consumer().run(until_idle=True)
    assert where(await handle.task()) == (Status.FAIL, "mail", None)
    assert where(await mesh.set_option("send", "k", on_fail="dead")) == (Status.FAIL, "dead", "mail")
    assert where(await mesh.set_option("send", "k", on_fail="graves")) == (Status.FAIL, "graves", "mail")
    assert where(await mesh.set_option("send", "k", on_fail=None)) == (Status.FAIL, "mail", None)


async def test_what_loses_its_workers_or_a_dependency_is_a_dead_letter_too(mesh: TaskMesh, fleet: Fleet) -> None:
    @mesh.task(name="poison", queue="mail", option=TaskOption(on_fail="dead", worker_timeout_ms=2_500, max_timeouts=0))
    async def poison(**_: Any) -> None: ...

    @mesh.task(queue="news", option=TaskOption(on_fail="dead"))
    async def after() -> None: ...

    lost = await poison.publish("k")
    waits = await after.configure(after=[lost]).publish("k")
    victim = fleet.start(names=["poison"])
    assert victim.wait() != 0
    async with working(mesh, names=["after"]):  # whoever comes writes down what time alone has finished

        async def is_dead() -> bool:
            return where(await waits.task()) == (Status.FAIL, "dead", "news")

        await eventually(is_dead)
    assert where(await lost.task()) == (Status.FAIL, "dead", "mail")


@pytest.mark.parametrize("bad", ["", "two words", "x" * 101, 7, ["dead"]])
def test_what_is_no_queue_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidOption, match="on_fail"):
        TaskOption(on_fail=bad)


async def test_older_tasks_and_readers_do_without(mesh: TaskMesh) -> None:
    """Nothing is stored of an option that is not set, so that workers of an older release read the tasks."""

    @mesh.task
    async def send() -> None: ...

    await send.publish("k")
    stored: Mapping[str, Any] | None = await mesh.store.driver.collection("tasks").find_one({})
    assert stored is not None
    assert "on_fail" not in stored["task_option"]
    assert "home" not in stored["task_state"]
