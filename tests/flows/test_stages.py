"""A task goes on in another queue as the same document, uncharged, and keeps its stages."""

from __future__ import annotations

from asyncio import Event
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskmesh import InvalidOption, InvalidParams, Next, Status, TaskMesh, TaskOption, current_task
from taskmesh.store import finish
from tests.flows.process_handlers import probe_elsewhere
from tests.waiting import eventually
from tests.working import working


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


class Films:
    """Tasks that begin in `in` and go on to `encode`; and what ran of them, in order."""

    def __init__(self, mesh: TaskMesh, **option: Any) -> None:
        self.mesh = mesh
        self.ran: list[tuple[str, str]] = []
        self.failures = 0
        self.at_work, self.may_end = Event(), Event()
        self.may_end.set()

        @mesh.task(queue="in", option=TaskOption(unexpected_retry_delay_ms=0, **option))
        async def film(path: str) -> str:
            self.ran.append(("in", path))
            raise Next(queue="encode", params={"path": path.upper(), "codec": "av1"})

        @film.on_queue("encode")
        async def encode(path: str, codec: str) -> str:
            self.ran.append((codec, path))
            self.at_work.set()
            await self.may_end.wait()
            if self.failures:
                self.failures -= 1
                raise ValueError("no encoder")
            return path

        self.film = film

    async def drained(self) -> list[tuple[str, str]]:
        """Run all that is due, and return what ran since the last time."""
        await drained(self.mesh)
        ran, self.ran[:] = self.ran.copy(), []
        return ran


async def test_what_starts_over_begins_in_its_first_stage_and_a_plain_retry_stays_in_its_last(mesh: TaskMesh) -> None:
    films = Films(mesh)
    film = films.film
    handle = await film.publish("k", path="a")
    assert await films.drained() == [("in", "a"), ("av1", "A")]
    ways: list[tuple[Callable[[], Awaitable[object]], list[tuple[str, str]]]] = [
        (lambda: mesh.retry("film", "k"), [("av1", "A")]),
        (lambda: mesh.retry("film", "k", fresh=True), [("in", "a"), ("av1", "A")]),
        (lambda: film.configure(run_again=True).publish("k", path="b"), [("in", "b"), ("av1", "B")]),
        (lambda: film.configure(clean_success=True).publish("k", path="c"), [("in", "b"), ("av1", "B")]),
        (lambda: film.configure(replace_running=True).publish("k", path="d"), [("in", "d"), ("av1", "D")]),
        (lambda: film.configure(throttle_ms=1).publish("k", path="e"), [("in", "e"), ("av1", "E")]),
        (
            lambda: film.configure(clean_success=True, update_existing_params=True).publish("k", path="f"),
            [("in", "f"), ("av1", "F")],
        ),
        (lambda: film.configure(run_again=True, queue="other").publish("k", path="g"), [("in", "g"), ("av1", "G")]),
        (lambda: mesh.retry("film", "k", fresh=True), [("in", "g"), ("av1", "G")]),
    ]
    for n, (way, expected) in enumerate(ways):
        await way()
        assert await films.drained() == expected, n
        task = await handle.task()
        began_in = "other" if n >= 7 else "in"
        assert [(stage.queue, stage.params) for stage in task.stages] == [(began_in, {"path": expected[-1][1].lower()})]
        assert (task.status, task.queue, task.task_state.home) == (Status.SUCCESS, "encode", None)


async def test_whoever_wants_it_again_does_not_disturb_the_stage_that_is_under_way(mesh: TaskMesh) -> None:
    films = Films(mesh, max_unexpected_retries=1)
    handle = await films.film.publish("k", path="a")
    films.may_end.clear()
    async with working(mesh, "w1"):
        await eventually(films.at_work.is_set)
        films.failures = 1
        await films.film.configure(run_again=True, queue="other", group="g").publish("k", path="b")
        films.may_end.set()
        assert await handle.result(60) == "B"
    assert films.ran == [("in", "a"), ("av1", "A"), ("av1", "A"), ("in", "b"), ("av1", "B")]
    task = await handle.task()
    assert ([stage.queue for stage in task.stages], task.queue, task.group) == (["other"], "encode", "g")


async def test_a_wish_from_the_first_stage_is_served_when_the_last_has_ended(mesh: TaskMesh) -> None:
    wished: list[str] = []

    @mesh.task(queue="in")
    async def film(path: str) -> None:
        if not wished:
            wished.append(path)
            await film.configure(run_again=True, queue="other", group="g").publish("k", path="b")
        raise Next(queue="encode")

    @film.on_queue("encode")
    async def encode(path: str) -> str:
        task = await mesh.get("film", "k")
        ran.append((path, [stage.queue for stage in task.stages], task.group))
        return path

    ran: list[tuple[str, list[str], str | None]] = []
    await film.publish("k", path="a")
    await drained(mesh)
    assert ran == [("b", ["other"], "g")] * 2, "the newest params and place, where the handler gives none of its own"


async def test_new_params_of_one_that_has_moved_on_are_those_with_which_it_begins(mesh: TaskMesh) -> None:
    films = Films(mesh, max_unexpected_retries=0)
    films.failures = 99
    handle = await films.film.publish("k", path="a")
    assert await films.drained() == [("in", "a"), ("av1", "A")]
    update = films.film.configure(update_existing_params=True)
    await update.publish("k", path="b")
    assert (await handle.task()).params == {"path": "A", "codec": "av1"}, (
        "this handler takes what the one before it gave"
    )
    await update.configure(clean_failed=True).publish("k", path="c")
    assert await films.drained() == [("av1", "A")]
    await mesh.retry("film", "k", fresh=True)
    assert await films.drained() == [("in", "c"), ("av1", "C")]
    await update.configure(queue="in", clean_failed=True).publish("k", path="d")
    assert await films.drained() == [("in", "d"), ("av1", "D")], "who names the queue takes it there"

    @mesh.task
    async def routed(n: int) -> int:
        if current_task().attempt == 1 and not (await mesh.get("routed", "k")).stages:
            raise Next(queue="later")
        raise ValueError(n)

    own = await routed.configure(max_unexpected_retries=0).publish("k", n=1)
    await drained(mesh)
    await routed.configure(update_existing_params=True).publish("k", n=2)
    task = await own.task()
    assert (task.queue, task.params) == ("later", {"n": 2}), "without params of its own, the stage has the task's"


async def test_a_dead_letter_goes_back_to_the_stage_that_failed_and_starts_over_in_the_first(mesh: TaskMesh) -> None:
    films = Films(mesh, max_unexpected_retries=0, on_fail="dead")
    films.failures = 99
    handle = await films.film.publish("k", path="a")

    async def where() -> tuple[str, str | None, list[str]]:
        task = await handle.task()
        return task.queue, task.task_state.home, [stage.queue for stage in task.stages]

    for way, after, ran in (
        (lambda: mesh.get("film", "k"), ("in", None, []), [("in", "a"), ("av1", "A")]),
        (lambda: mesh.bulk.redrive("dead"), ("encode", None, ["in"]), [("av1", "A")]),
        (lambda: mesh.retry("film", "k"), ("encode", None, ["in"]), [("av1", "A")]),
        (lambda: mesh.retry("film", "k", fresh=True), ("in", None, []), [("in", "a"), ("av1", "A")]),
        (
            lambda: films.film.configure(run_again=True).publish("k", path="b"),
            ("in", None, []),
            [("in", "b"), ("av1", "B")],
        ),
    ):
        await way()
        assert await where() == after
        assert await films.drained() == ran
        assert await where() == ("dead", "encode", ["in"])


async def test_however_many_stages_the_first_is_kept(mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "KEPT_STAGES", 3)

    @mesh.task(queue="q0")
    async def hop(n: int) -> int:
        if n == 5:
            return n
        raise Next(queue=f"q{n + 1}", params={"n": n + 1})

    handle = await hop.publish("k", n=0)
    for _ in range(2):
        await drained(mesh)
        stages = (await handle.task()).stages
        assert [(stage.queue, stage.params) for stage in stages] == [(f"q{n}", {"n": n}) for n in (0, 3, 4)]
        retried = await mesh.retry("hop", "k", fresh=True)
        assert (retried.queue, retried.params, retried.stages) == ("q0", {"n": 0}, [])


async def test_one_that_waits_in_a_later_stage_can_be_begun_anew(mesh: TaskMesh) -> None:
    films = Films(mesh)
    await films.film.publish("k", path="a")
    await mesh.consumer(queues=["in"]).run(until_idle=True)
    assert films.ran.pop() == ("in", "a")
    due = await mesh.retry("film", "k")
    assert (due.status, due.queue) == (Status.INIT, "encode")
    anew = await mesh.retry("film", "k", fresh=True)
    assert (anew.status, anew.queue, anew.params) == (Status.INIT, "in", {"path": "a"})
    await mesh.consumer(queues=["in"]).run(until_idle=True)
    await films.film.configure(run_again=True).publish("k", path="b")
    assert await films.drained() == [("in", "a"), ("in", "b"), ("av1", "B")]


async def test_signals_that_nobody_has_consumed_go_on_with_the_task_and_none_comes_twice(mesh: TaskMesh) -> None:
    @mesh.task(queue="in")
    async def order() -> list[int]:
        task = current_task()
        assert await task.wait_for("paid") == 1
        await mesh.signal("order", task.key, "approved", 2, signal_id="a")
        raise Next(queue="out")

    @order.on_queue("out")
    async def ship() -> list[int]:
        task = current_task()
        await mesh.signal("order", task.key, "paid", 3, signal_id="p")  # which the stage before has consumed
        return [await task.wait_for("approved"), await task.wait_for("paid", timeout_ms=1) or 0]

    handle = await order.publish("k")
    await mesh.signal("order", "k", "paid", 1, signal_id="p")
    async with working(mesh, "w1"):
        assert await handle.result(60) == [2, 0]
    await mesh.retry("order", "k", fresh=True)
    assert (await handle.task()).task_state.signals == []


async def test_one_that_has_moved_on_has_begun_and_does_not_expire(mesh: TaskMesh) -> None:
    @mesh.task(queue="in")
    async def film() -> str:
        raise Next(queue="encode")

    film.on_queue("encode")(lambda: "done")
    expires = datetime.now(UTC) + timedelta(hours=1)
    handle = await film.configure(expire_time=expires).publish("k")
    await mesh.consumer(queues=["in"]).run(until_idle=True)
    mesh.store.move_on(timedelta(hours=2))
    await drained(mesh)
    assert await handle.result(60) == "done"


async def test_what_others_return_is_for_the_stage_that_was_published(mesh: TaskMesh) -> None:
    @mesh.task
    async def first() -> int:
        return 5

    @mesh.task(queue="in")
    async def film(own: bool, x: int = 0) -> tuple[int, int]:
        seen.append(x)
        raise Next(queue="encode", params={"y": x + 1} if own else None)

    @film.on_queue("encode")
    async def encode(own: bool | None = None, x: int = 0, y: int = 0) -> tuple[int, int]:
        assert own in (None, False)
        return x, y

    seen: list[int] = []
    waited_for = await first.publish("f")
    handles = {own: await film.configure(after={"x": waited_for}).publish(str(own), own=own) for own in (True, False)}
    for _ in range(2):
        await drained(mesh)
        assert {own: await handle.result(60) for own, handle in handles.items()} == {True: (0, 6), False: (5, 0)}
        for own in handles:
            await mesh.retry("film", str(own), fresh=True)
    assert seen == [5] * 4
