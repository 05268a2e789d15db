"""Events: what happens to tasks is told completely, in order for each task, and can be resumed; what is missed is said."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import InvalidOption, Retry, Snooze, Status, TaskDefinition, TaskEvent, TaskMesh, TaskOption, current_task
from taskmesh.client.events import EventReader
from taskmesh.store.claim import claim
from taskmesh.store.renew import extend
from tests.waiting import eventually
from tests.working import working

AT_ONCE = TaskOption(unexpected_retry_delay_ms=0, unexpected_retry_jitter=0)


def define_all(mesh: TaskMesh) -> dict[str, Any]:
    @mesh.task
    async def good() -> int:
        return 1

    @mesh.task(option=AT_ONCE.changed(max_unexpected_retries=1))
    async def bad() -> None:
        raise ValueError

    @mesh.task
    async def talks() -> None:
        await current_task().progress(0.5)
        await eventually(lambda: _progress_of(mesh, "talks"))

    @mesh.task
    async def says_and_ends() -> None:
        await current_task().progress(0.5)

    @mesh.task(option=AT_ONCE.changed(max_unexpected_retries=0))
    async def says_and_fails() -> None:
        await current_task().progress(0.5)
        raise ValueError

    @mesh.task
    async def snoozes() -> None:
        if not snoozed:
            snoozed.append(True)
            raise Snooze(delay_ms=0)

    snoozed: list[bool] = []
    kinds: list[TaskDefinition[[], Any]] = [good, bad, talks, says_and_ends, says_and_fails, snoozes]
    return {kind.name: kind for kind in kinds}


async def _progress_of(mesh: TaskMesh, name: str) -> Any:
    return (await mesh.get(name, "k")).task_state.progress


async def until_finished(events: EventReader, count: int = 1) -> list[TaskEvent]:
    """Read until so many tasks have finished."""
    seen: list[TaskEvent] = []
    async with asyncio.timeout(60):
        async for event in events:
            seen.append(event)
            count -= event.kind == "finished"
            if count == 0:
                return seen
    raise AssertionError(f"the iterator ended early, after {seen}")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("good", ["published", "claimed", "succeeded", "finished"]),
        ("bad", ["published", "claimed", "failed", "claimed", "failed", "finished"]),
        ("talks", ["published", "claimed", "progressed", "succeeded", "finished"]),
        ("says_and_ends", ["published", "claimed", "progressed", "succeeded", "finished"]),
        ("says_and_fails", ["published", "claimed", "progressed", "failed", "finished"]),
        ("snoozes", ["published", "claimed", "snoozed", "claimed", "succeeded", "finished"]),
    ],
)
async def test_a_task_s_life_is_told_in_order(mesh: TaskMesh, name: str, kinds: list[str]) -> None:
    definition = define_all(mesh)[name]
    async with mesh.events() as events, working(mesh, "w1"):
        await definition.publish("k")
        told = await until_finished(events)
    assert [event.kind for event in told] == kinds
    assert {(event.name, event.key) for event in told} == {(name, "k")}
    assert [event.worker_id for event in told] == [None] + ["w1"] * (len(kinds) - 1)
    assert told[-1].status == (Status.FAIL if name in ("bad", "says_and_fails") else Status.SUCCESS)
    assert sorted(event.time for event in told) == [event.time for event in told]
    assert all(event.time.utcoffset() is not None for event in told)


async def test_what_people_do_to_a_task_is_told(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events() as events:
        await good.configure(delay_ms=60_000).publish("k")
        await mesh.set_option("good", "k", priority=1)
        await mesh.retry("good", "k")
        await mesh.cancel("good", "k")
        await mesh.retry("good", "k")
        await mesh.delete("good", "k")
        told = []
        async with asyncio.timeout(60):
            async for event in events:
                told.append(event.kind)
                if event.kind == "deleted":
                    break
    assert told == ["published", "option_changed", "retried", "cancelled", "finished", "retried", "deleted"]


async def test_a_lost_lease_is_told_with_the_worker_that_lost_it(mesh: TaskMesh) -> None:
    @mesh.task
    async def once() -> None: ...

    async with mesh.events() as events:
        await once.publish("k")
        consumer = mesh.consumer(worker_id="dies")
        await _claim_and_leave(mesh, "once:k", "dies")
        async with working(mesh, "lives"):
            told = await until_finished(events)
    assert [(event.kind, event.worker_id) for event in told] == [
        ("published", None),
        ("claimed", "dies"),
        ("timed_out", "dies"),
        ("claimed", "lives"),
        ("succeeded", "lives"),
        ("finished", "lives"),
    ]
    assert consumer.state == "ready"


async def _claim_and_leave(mesh: TaskMesh, id_: str, worker_id: str) -> None:
    """Claim as a worker does that dies right after, and let its lease run out, and no other that is given later."""
    assert await claim(mesh.store, [id_], worker_id, "r1")
    assert await extend(mesh.store, id_, "r1", lease_ms=0)


async def test_expiry_is_told_once_it_is_written_down(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events("good") as events, working(mesh, names=["bad"]):
        await good.configure(expire_time=mesh.clock.now()).publish("k")
        told = await until_finished(events)
    assert [(event.kind, event.status) for event in told] == [("published", None), ("finished", "EXPIRED")]


async def test_events_can_be_narrowed_to_a_name_and_a_key(mesh: TaskMesh) -> None:
    defined = define_all(mesh)
    async with mesh.events() as all_, mesh.events("good") as good, mesh.events("good", "k2") as one, working(mesh):
        for key in ("k", "k2"):
            await defined["good"].publish(key)
        await defined["talks"].publish("k")
        assert {(e.name, e.key) for e in await until_finished(all_, 3)} == {
            ("good", "k"),
            ("good", "k2"),
            ("talks", "k"),
        }
        assert {(e.name, e.key) for e in await until_finished(good, 2)} == {("good", "k"), ("good", "k2")}
        assert {(e.name, e.key) for e in await until_finished(one)} == {("good", "k2")}


async def test_mesh_events_can_be_iterated_directly(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]

    async def read() -> str:
        async for event in mesh.events():
            return event.kind
        raise AssertionError("ended")

    reading = asyncio.ensure_future(read())
    await eventually(lambda: mesh.feed.position is not None)
    await good.publish("k")
    assert await asyncio.wait_for(reading, 60) == "published"


async def test_consumer_events_can_be_iterated_directly_and_end_with_the_consumer(mesh: TaskMesh) -> None:
    defined = define_all(mesh)
    told: list[TaskEvent] = []
    async with working(mesh, "me") as consumer, working(mesh, "other", names=["talks"]):
        consumer_names = consumer.names

        async def read() -> None:
            async for event in consumer.events():
                told.append(event)  # noqa: PERF401 — what has come so far is looked at meanwhile

        reading = asyncio.ensure_future(read())
        await eventually(lambda: consumer._readers)
        await (await consumer.events())  # awaited, it is open
        await (await defined["good"].publish("k")).result(60)
        await eventually(lambda: [event for event in told if event.kind == "finished"])
        await consumer.stop()
        await asyncio.wait_for(reading, 60)
    assert "good" in consumer_names
    assert [event.kind for event in told] == ["claimed", "succeeded", "finished"]
    assert {event.worker_id for event in told} == {"me"}
    assert [event async for event in consumer.events()] == []


async def test_a_reader_ends_with_the_mesh(mongo_uri: str, database: str) -> None:
    async with TaskMesh(mongo_uri, database=database) as mesh:
        events = await mesh.events()
        reading = asyncio.ensure_future(anext(events, "ended"))
    assert await asyncio.wait_for(reading, 60) == "ended"


async def test_a_slow_reader_is_told_how_many_it_missed(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events(buffer=5) as events, mesh.events() as fast:
        await good.publish_many({str(i): {} for i in range(20)})
        async with asyncio.timeout(60):
            for _ in range(20):
                await anext(fast)
            told = [await anext(events) for _ in range(6)]
        await good.publish("later")
        told.append(await anext(events))
    assert [event.kind for event in told] == ["published"] * 5 + ["missed", "published"]
    assert told[5].missed == 15
    assert told[6].key == "later"


async def test_a_reader_goes_on_behind_the_token_of_any_event(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events() as first, working(mesh), AsyncExitStack() as stack:
        for key in ("a", "b"):
            await (await good.publish(key)).result(60)
        whole = await until_finished(first, 2)
        readers = [await stack.enter_async_context(mesh.events(after=event.token)) for event in whole[:7]]
        await (await good.publish("c")).result(60)
        rests = [await until_finished(reader, 1 + (n < 4) + (n < 8)) for n, reader in enumerate(readers, 1)]
        live = await until_finished(first, 1)
    assert len(rests) == 7
    for n, rest in enumerate(rests, 1):
        assert [(e.kind, e.key) for e in whole[:n] + rest] == [(e.kind, e.key) for e in whole + live], n
        assert [e.token for e in rest] == [e.token for e in (whole + live)[n:]], "the places are the same ones"


async def test_what_happens_while_the_past_is_read_leaves_every_place_as_it_is(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events() as first, working(mesh):
        await good.publish("a")
        past = await until_finished(first)
        async with mesh.events(after=past[0].token) as second:
            told = [await anext(second)]
            await good.publish("b")
            live = await until_finished(first)
            told += await until_finished(second, 2)
    assert [(e.kind, e.key, e.token) for e in told] == [(e.kind, e.key, e.token) for e in (past + live)[1:]]


async def test_resuming_while_much_happens_neither_loses_nor_repeats(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    count = 300
    async with mesh.events() as first:
        await good.publish("start")
        token = (await anext(first)).token
        publishing = asyncio.ensure_future(_publish_one_by_one(good, count))
        told: list[TaskEvent] = []
        async with asyncio.timeout(60):
            while len(told) < count:  # resumed again and again, at any place
                async with mesh.events(after=token) as events:
                    for _ in range(37):
                        told.append(await anext(events))
                        token = told[-1].token
                        if len(told) == count:
                            break
        await publishing
    assert [event.key for event in told] == [str(i) for i in range(count)]


async def _publish_one_by_one(definition: Any, count: int) -> None:
    for i in range(count):
        await definition.publish(str(i))


@pytest.mark.usefixtures("never_used")
async def test_one_stream_serves_all_readers_of_a_process(mesh: TaskMesh, mongo_uri: str, database: str) -> None:
    good = define_all(mesh)["good"]
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        open_streams: list[Any] = []

        async def there_is_one() -> bool:
            pipeline: list[dict[str, Any]] = [
                {"$currentOp": {"allUsers": True, "idleCursors": True}},
                {"$match": {"cursor.originatingCommand.aggregate": 1, "ns": {"$regex": f"^{database}\\."}}},
            ]
            async with await client.admin.aggregate(pipeline) as cursor:
                open_streams[:] = await cursor.to_list()
            return len(open_streams) == 1

        async with working(mesh, "a"), working(mesh, "b"), mesh.events() as one, mesh.events("good") as two:
            waiting = [asyncio.ensure_future((await good.publish(f"w{i}")).result(60)) for i in range(5)]
            await asyncio.gather(*waiting)
            assert await until_finished(one, 5)
            assert await until_finished(two, 5)
            await good.publish("last")
            token = (await until_finished(one))[-1].token
            async with mesh.events(after=token) as resumed:
                await good.publish("behind")
                assert (await asyncio.wait_for(anext(resumed), 60)).key == "behind"
            try:
                await eventually(there_is_one)
            except AssertionError as error:
                raise AssertionError(f"{error}: {open_streams}") from None


async def test_lost_history_is_told_as_a_gap(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events() as first:
        await good.publish("k")
        token = (await anext(first)).token
        assert token is not None
        # A place long before the oplog's beginning: the timestamp follows the token's first byte.
        ancient = token[:2] + "00000001" + token[10:]
        async with mesh.events(after=ancient) as events:
            assert (await asyncio.wait_for(anext(events), 60)).kind == "gap"
            await good.publish("k2")
            assert (await asyncio.wait_for(anext(events), 60)).key == "k2"


async def test_what_is_no_token_is_refused(mesh: TaskMesh) -> None:
    for no_token in ("", "no token", "82AB+x"):
        with pytest.raises(InvalidOption, match="token"):
            mesh.events(after=no_token)
    good = define_all(mesh)["good"]
    async with mesh.events() as events:
        await good.publish("k")
        token = (await anext(events)).token
    assert token is not None
    for of_the_same_characters in (token[:-1], token[:20], "AB12"):
        async with mesh.events(after=of_the_same_characters) as events:
            with pytest.raises(InvalidOption, match="token"):
                await asyncio.wait_for(anext(events), 60)


async def test_queues_and_workers_are_no_tasks(mesh: TaskMesh) -> None:
    good = define_all(mesh)["good"]
    async with mesh.events() as events, working(mesh, "w1", names=["bad"]):
        await mesh.pause("default")
        await mesh.pause_worker("w1")
        await good.publish("k")
        assert (await asyncio.wait_for(anext(events), 60)).key == "k"


async def test_a_worker_beside_a_reader_calls_no_task_strange_that_waits_for_others(
    mesh: TaskMesh, caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.task
    async def job() -> None: ...

    async with working(mesh), mesh.events("job") as events:
        first = await job.publish("first")
        await job.configure(after=[first]).publish("after it")
        await job.configure(sequence_key="line").publish("in line")
        async with mesh.flow("flow") as flow:
            flow.add(job, "member")
        await until_finished(events, 4)
    assert [line for line in caplog.messages if "is not a taskmesh task" in line] == []


async def test_retry_counts_as_failed(mesh: TaskMesh) -> None:
    @mesh.task
    async def retries() -> None:
        if current_task().attempt == 1:
            raise Retry(delay_ms=0)

    async with mesh.events() as events, working(mesh):
        await retries.publish("k")
        told = await until_finished(events)
    assert [event.kind for event in told] == ["published", "claimed", "failed", "claimed", "succeeded", "finished"]
