"""Tasks of one sequence key in one queue run one after the other, in the order of publication."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import InvalidOption, Retry, Snooze, Status, TaskFailed, TaskMesh, TaskOption, current_task
from taskmesh.consumer.run.dependents import Dependents
from taskmesh.store.relations import dependencies, sequences
from tests.waiting import eventually
from tests.working import all_working, finished, status_is, working


async def test_each_key_is_worked_off_in_order_one_after_the_other_by_several_workers(mesh: TaskMesh) -> None:
    ran: dict[str, list[int]] = {}
    at_work: set[str] = set()

    @mesh.task
    async def step(customer: str, place: int) -> None:
        assert customer not in at_work, "two of one key at once"
        at_work.add(customer)
        ran.setdefault(customer, []).append(place)
        await asyncio.sleep(0)
        at_work.discard(customer)

    for customer in ("ada", "bob", "eve"):
        tasks = {f"{customer}-{place * 37 % 11}": {"customer": customer, "place": place} for place in range(11)}
        await step.configure(sequence_key=customer).publish_many(tasks)
    async with all_working(mesh, ["w1", "w2"], concurrency=4):
        await eventually(lambda: sum(map(len, ran.values())) == 33)
    assert ran == {customer: list(range(11)) for customer in ("ada", "bob", "eve")}


async def test_nothing_is_left_of_a_line_that_is_empty(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    @mesh.task
    async def step() -> None:
        """Do nothing."""

    await step.configure(sequence_key="k").publish_many({"a": {}, "b": {}})
    await mesh.consumer(worker_id="w").run(until_idle=True)
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        await eventually(lambda: client[database]["sequences"].count_documents({}) == 0)
        assert client[database]["tasks"].count_documents({"status": "SUCCESS"}) == 2


async def test_a_head_that_a_worker_has_not_opened_before_it_died_is_opened_by_the_next_look(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the head already: that it stays shut is noticed by its gate alone. The mark of the task before it is left."""
    open_heads, died_before = sequences._open, list[str]()

    async def opens_or_dies(store: Any, heads: Any) -> bool:
        if not died_before and (new := [head["head"] for head in heads if head["head"] != "work:k0"]):
            died_before.extend(new)
            return False
        return await open_heads(store, heads)

    monkeypatch.setattr(sequences, "_open", opens_or_dies)

    @mesh.task
    async def work() -> None:
        return None

    handles = await work.configure(sequence_key="a").publish_many({f"k{n}": {} for n in range(3)})
    async with working(mesh, "w1"):
        for handle in handles:
            await handle.result(timeout=60)
    assert died_before == ["work:k1"]


async def test_until_idle_works_off_a_whole_line(mesh: TaskMesh) -> None:
    ran: list[int] = []

    @mesh.task
    async def step(place: int) -> None:
        ran.append(place)

    await step.configure(sequence_key="k").publish_many({f"k{n}": {"place": n} for n in range(8)})
    await mesh.consumer(worker_id="w").run(until_idle=True)
    assert ran == list(range(8))


async def test_what_retries_and_sleeps_keeps_its_place_at_the_head(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task(option=TaskOption(unexpected_retry_delay_ms=50))
    async def step(name: str) -> None:
        ran.append(name)
        attempt = ran.count(name)
        if name == "fails" and attempt == 1:
            raise ValueError("once")
        if name == "retries" and attempt == 1:
            raise Retry(delay_ms=50)
        if name == "snoozes" and attempt == 1:
            raise Snooze(delay_ms=50)
        if name == "sleeps":
            await current_task().sleep("a while", seconds=1.1)

    names = ("fails", "retries", "snoozes", "sleeps", "last")
    await step.configure(sequence_key="k").publish_many({name: {"name": name} for name in names})
    async with working(mesh, "w", concurrency=5):
        await finished(mesh, "step", "last")
    assert ran == ["fails", "fails", "retries", "retries", "snoozes", "snoozes", "sleeps", "sleeps", "last"]


async def test_a_failure_lets_the_next_go_on_or_blocks_it_until_it_is_retried_or_deleted(mesh: TaskMesh) -> None:
    broken = True
    ran: list[str] = []

    @mesh.task
    async def step(name: str) -> None:
        ran.append(name)
        if name.startswith("bad") and broken:
            raise TaskFailed("broken")

    goes_on, blocks = (
        step.configure(sequence_key=policy, on_sequence_failure=policy) for policy in ("continue", "block")
    )
    await goes_on.publish_many({"bad-1": {"name": "bad-1"}, "after-1": {"name": "after-1"}})
    await blocks.publish_many({"bad-2": {"name": "bad-2"}, "bad-3": {"name": "bad-3"}, "after-3": {"name": "after-3"}})
    async with working(mesh, "w"):
        await finished(mesh, "step", "after-1")
        await status_is(mesh, "step", "bad-2", Status.FAIL)
        assert (await mesh.get("step", "bad-3")).status is Status.INIT
        broken = False
        await mesh.retry("step", "bad-2")
        await status_is(mesh, "step", "bad-2", Status.SUCCESS)
        await status_is(mesh, "step", "after-3", Status.SUCCESS)
    assert [name for name in ran if name.endswith("1")] == ["bad-1", "after-1"]
    assert [name for name in ran if not name.endswith("1")] == ["bad-2", "bad-2", "bad-3", "after-3"]


async def test_one_that_blocks_its_line_does_so_too_if_it_fails_before_it_is_at_the_head(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def step() -> None:
        ran.append(current_task().key)

    helps = await step.configure(delay_ms=3_600_000).publish("helps")
    line = step.configure(sequence_key="k", on_sequence_failure="block")
    await line.publish("first")
    await line.configure(after=[helps]).publish("second")
    await line.publish("third")
    await helps.cancel()
    assert (await mesh.get("step", "second")).status is Status.FAIL
    await mesh.consumer(worker_id="w").run(until_idle=True)
    assert ran == ["first"]
    [gate] = [gate for gate in (await mesh.explain("step", "third"))[0].gates if gate.name == "sequence"]
    assert gate.reason.startswith("sequence_key 'k' in queue default: at the head is 'step' 'second' (FAIL;")
    await mesh.retry("step", "helps")
    await mesh.consumer(worker_id="w").run(until_idle=True)
    assert ran == ["first", "helps", "second", "third"]


@pytest.mark.parametrize("how", ["cancel", "delete", "expire", "raw delete"])
async def test_a_head_that_is_cancelled_deleted_or_expired_makes_way(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(sequences, "_FIRST_LOOK_AFTER_MS", 100)

    @mesh.task
    async def step() -> None:
        """Do nothing."""

    line = step.configure(sequence_key="k")
    await line.configure(delay_ms=3_600_000).publish("head")
    await line.publish("next")
    async with working(mesh, "w"):
        assert (await mesh.get("step", "next")).status is Status.INIT
        if how == "cancel":
            await mesh.cancel("step", "head")
        elif how == "delete":
            await mesh.delete("step", "head")
        elif how == "expire":
            soon = (await mesh.get("step", "head")).task_state.create_time + timedelta(milliseconds=1)
            await line.configure(update_existing_params=True, expire_time=soon).publish("head")
        else:
            with MongoClient[dict[str, Any]](mongo_uri) as client:
                client[database]["tasks"].delete_one({"_id": "step:head"})
        await finished(mesh, "step", "next")


async def test_a_head_that_waits_for_long_is_looked_at_ever_less_often(mesh: TaskMesh) -> None:
    @mesh.task
    async def step() -> None:
        """Do nothing."""

    line = step.configure(sequence_key="k", delay_ms=86_400_000)
    heads = mesh.store.driver.collection(mesh.store.sequences)
    begun = mesh.store.now = datetime(2036, 6, 1, 12, tzinfo=UTC)

    async def looks(until_s: int) -> list[float]:
        """Sweep every five seconds. Return after how many seconds the head was looked at."""
        found: list[float] = []
        for second in range(0, until_s, 5):
            mesh.store.now = begun + timedelta(seconds=second)
            before = await heads.find_one()
            await sequences.sweep(mesh.store)
            if await heads.find_one() != before:
                found.append(second)
        return found

    await line.publish("first")
    await line.publish("second")
    assert await looks(2_000) == [10, 30, 70, 150, 310, 630, 1_230, 1_830]
    begun = mesh.store.now
    await mesh.cancel("step", "first")
    assert await looks(100) == [10, 30, 70], "a new head begins anew"


async def _line_held_by_b(mesh: TaskMesh) -> tuple[list[str], asyncio.Event, asyncio.Event]:
    """Publish a, b and c in one line: b says when it has begun, and waits until it may go on. Return who ran, and both events."""
    ran: list[str] = []
    holding, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def step(name: str) -> None:
        ran.append(name)
        if name == "b":
            holding.set()
            await go_on.wait()

    await step.configure(sequence_key="k").publish_many({name: {"name": name} for name in "abc"})
    return ran, holding, go_on


async def test_a_finished_one_that_is_retried_stands_in_line_again(mesh: TaskMesh) -> None:
    ran, holding, go_on = await _line_held_by_b(mesh)
    async with working(mesh, "w"):
        await holding.wait()
        await mesh.retry("step", "a")
        [why] = await mesh.explain("step", "a", worker_id="w")
        [gate] = [gate for gate in why.gates if gate.name == "sequence"]
        assert not gate.open
        assert gate.reason == "sequence_key 'k' in queue default: at the head is 'step' 'b' (RUNNING)"
        go_on.set()
        await finished(mesh, "step", "c")
        await finished(mesh, "step", "a")
    assert ran == ["a", "b", "a", "c"]


async def test_in_a_session_and_beside_each_other_all_get_in(mesh: TaskMesh) -> None:
    ran: list[int] = []

    @mesh.task
    async def step(place: int) -> None:
        ran.append(place)

    line = step.configure(sequence_key="k")
    async with mesh.store.driver.session() as session, await session.start_transaction():
        await line.configure(session=session).publish("in-session", place=0)
    await asyncio.gather(*(line.publish(f"k{n}", place=n) for n in range(1, 30)))
    async with all_working(mesh, ["w1", "w2"]):
        await eventually(lambda: len(ran) == 30)
    assert ran == list(range(30))


@pytest.mark.parametrize("key", ["", "x" * 5_000, "a\0b", 7])
async def test_a_bad_key_or_policy_is_refused(mesh: TaskMesh, key: Any) -> None:
    @mesh.task
    async def step() -> None:
        """Do nothing."""

    with pytest.raises(InvalidOption, match="sequence_key must be a text"):
        step.configure(sequence_key=key)
    with pytest.raises(InvalidOption, match="on_sequence_failure must be 'continue' or 'block', got 'stop'"):
        step.configure(on_sequence_failure="stop")  # type: ignore[arg-type]  # that is the point


async def test_what_a_handler_publishes_in_line_is_asked_about_with_its_success(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_sweep(*_: Any, **__: Any) -> None:
        """The marks are left to those who made them."""

    monkeypatch.setattr(Dependents, "sweep", no_sweep)
    ran: list[str] = []

    @mesh.task
    async def step(name: str) -> None:
        ran.append(name)

    @mesh.task
    async def first() -> None:
        for name in "abc":
            await current_task().publish(step.configure(sequence_key="k"), name, name=name)

    await first.publish("k")
    async with working(mesh, "w"):
        await finished(mesh, "first", "k")
        await finished(mesh, "step", "c")
    assert ran == ["a", "b", "c"]


async def test_a_head_that_is_wished_once_more_while_it_runs_goes_behind_the_others(mesh: TaskMesh) -> None:
    ran: list[str] = []
    holding, go_on = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def step(name: str) -> None:
        ran.append(name)
        if ran == ["a"]:
            holding.set()
            await go_on.wait()

    line = step.configure(sequence_key="k")
    await line.publish_many({name: {"name": name} for name in "abc"})
    async with working(mesh, "w"):
        await holding.wait()
        await line.configure(run_again=True).publish("a", name="a")
        go_on.set()
        await eventually(lambda: len(ran) == 4)
    assert ran == ["a", "b", "c", "a"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_head_that_is_put_back_stands_in_line_again(mesh: TaskMesh, how: str) -> None:
    ran, holding, go_on = await _line_held_by_b(mesh)
    act = {"cancel": mesh.bulk.cancel, "delete": mesh.bulk.delete}[how]
    done = await act("name:step key:a")
    assert (done.done, done.id is not None) == (1, True)
    async with working(mesh, "w"):
        await holding.wait()
        assert (await mesh.bulk.undo(str(done.id))).restored == 1
        [why] = await mesh.explain("step", "a", worker_id="w")
        assert [gate.name for gate in why.gates if not gate.open] == ["sequence"]
        go_on.set()
        await finished(mesh, "step", "c")
        await finished(mesh, "step", "a")
    assert ran == ["b", "a", "c"]


async def test_a_flow_in_which_order_and_after_contradict_each_other_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def step() -> None: ...

    async def publish() -> None:
        async with mesh.flow("f") as flow:
            flow.add(step.configure(sequence_key="k"), "first", after=[("step", "between")])
            flow.add(step, "between", after=[("step", "last")])
            flow.add(step.configure(sequence_key="k"), "last")

    with pytest.raises(InvalidOption, match=r"circle.* one sequence_key, add first what others wait for") as told:
        await publish()
    assert all(f"'step' '{key}'" in str(told.value) for key in ("first", "between", "last"))
    assert await mesh.listing.count() == 0


async def test_a_head_that_waits_for_a_task_behind_it_is_told_and_so_is_what_helps(mesh: TaskMesh) -> None:
    ran: list[str] = []

    @mesh.task
    async def step() -> None:
        ran.append(current_task().key)

    line = step.configure(sequence_key="k")
    before = await line.publish("before")
    await line.configure(after=[before], on_dependency_failure="wait").publish("after")
    assert "sequences" not in {finding.subject for finding in await mesh.inspect.doctor()}
    await before.cancel()
    await mesh.retry("step", "before")  # so it stands behind who waits for it
    await mesh.consumer(worker_id="w").run(until_idle=True)
    assert ran == []
    [finding] = [finding for finding in await mesh.inspect.doctor() if finding.subject == "sequences"]
    assert finding.found.startswith("'step' 'after' waits for 'step' 'before', which is behind it")
    [told] = [gate for gate in (await mesh.explain("step", "after"))[0].gates if gate.name == "dependencies"]
    assert "'step' 'before' is behind it in its own sequence" in told.reason
    await mesh.cancel("step", "after")
    await mesh.consumer(worker_id="w").run(until_idle=True)
    await mesh.retry("step", "after")
    await mesh.consumer(worker_id="w").run(until_idle=True)
    assert ran == ["before", "after"]


class _Commands(CommandListener):
    """How many commands were sent, by name and collection."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()

    def started(self, event: CommandStartedEvent) -> None:
        self.sent[f"{event.command_name} {event.command.get(event.command_name)}"] += 1

    def failed(self, event: CommandFailedEvent) -> None: ...
    def succeeded(self, event: CommandSucceededEvent) -> None: ...


async def _no_sweep(*_: Any, **__: Any) -> None:
    """Do nothing."""


async def test_a_task_in_line_costs_three_writes_and_one_to_its_line_and_leaves_nothing(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dependents, "sweep", _no_sweep)
    monkeypatch.setattr(dependencies, "_LEFT_FOR_S", 3_600.0)
    commands, count = _Commands(), 30
    client = AsyncMongoClient[Any](mongo_uri, event_listeners=[commands], tz_aware=True)
    async with client, TaskMesh(client, database=database) as mesh:
        marked, lines = {"task_state.ask_time": {"$exists": True}}, client[database]["sequences"]

        @mesh.task
        async def step() -> None:
            """Do nothing."""

        line = step.configure(sequence_key="k")
        handles = await line.publish_many({f"k{n}": {} for n in range(count)})
        async with working(mesh, "w"):
            commands.sent.clear()
            for handle in handles:
                await handle.result(60)
            await eventually(lambda: commands.sent["update sequences"] == count - 1)
            # Claimed, recorded, opened. (The marks are left for an hour, as is a line that is empty.)
            assert commands.sent["findAndModify tasks"] + commands.sent["update tasks"] <= 3 * count + 3, commands.sent
            assert (commands.sent["aggregate sequences"], commands.sent["delete sequences"]) == (0, 0)
            assert await client[database]["tasks"].count_documents(marked) == count
            # Who comes later finds the head that has left, and takes its place.
            await (await line.publish("later")).result(60)
            assert await lines.count_documents({}) == 1
        assert await client[database]["tasks"].count_documents(marked) == 0
        assert await lines.count_documents({}) == 0


async def test_a_publisher_removes_what_it_has_left_when_it_closes(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "_LEFT_FOR_S", 3_600.0)
    marked = {"task_state.ask_time": {"$exists": True}}
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        async with TaskMesh(mongo_uri, database=database) as mesh:

            @mesh.task
            async def step() -> None:
                """Do nothing."""

            await step.configure(sequence_key="k").publish("a")
            await step.configure(sequence_key="k").publish("b")
            assert client[database]["tasks"].count_documents(marked) == 2
        assert client[database]["tasks"].count_documents(marked) == 0
        assert client[database]["tasks"].count_documents({"task_state.in_line": True}) == 1


async def test_what_a_worker_leaves_that_dies_another_removes(
    mesh: TaskMesh, mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "_LEFT_FOR_S", 3_600.0)

    @mesh.task
    async def step() -> None:
        """Do nothing."""

    handle = await step.configure(sequence_key="k").publish("a")
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        with monkeypatch.context() as dies:
            dies.setattr(dependencies.Leftovers, "removed", _no_sweep)
            dies.setattr(Dependents, "sweep", _no_sweep)
            async with working(mesh, "w1"):
                await handle.result(60)
                await eventually(lambda: client[database]["tasks"].find_one({"task_state.ask_time": {"$exists": True}}))
            assert client[database]["sequences"].count_documents({}) == 1
        monkeypatch.setattr(dependencies, "_LEFT_FOR_S", 0.3)
        async with working(mesh, "w2"):
            await eventually(lambda: client[database]["sequences"].count_documents({}) == 0)
            await eventually(
                lambda: client[database]["tasks"].count_documents({"task_state.ask_time": {"$exists": True}}) == 0
            )
