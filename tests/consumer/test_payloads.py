"""Params and results that are stored apart from their tasks, since they are large: they come back, and go with the task."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from bson import ObjectId
from pydantic import SecretStr
from pymongo import AsyncMongoClient

from taskmesh import AESCodec, Ending, InvalidOption, Next, PayloadMissing, Status, Task, TaskMesh, current_task
from taskmesh.store import apart
from taskmesh.store.payloads import references
from tests.waiting import eventually
from tests.web.conftest import browser
from tests.working import finished, working

LARGE = "large " * 1_000
LARGER = "larger " * 2_000


@pytest.fixture
async def stored(mongo_uri: str, database: str) -> AsyncIterator[Any]:
    """The database of the test, as it is."""
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        yield client[database]


@pytest.fixture
async def large(mongo_uri: str, database: str) -> AsyncIterator[TaskMesh]:
    """A mesh that stores apart what has more than a thousand bytes."""
    async with TaskMesh(mongo_uri, database=database, payload_threshold=1_000) as mesh:
        yield mesh


async def apart_of(stored: Any) -> int:
    """How many values are stored apart, in part or whole."""
    return len({chunk["_id"]["id"] async for chunk in stored.payloads.find({}, {"_id": 1})})


async def swept(mesh: TaskMesh, **later: float) -> int:
    """Let a time pass, and sweep."""
    mesh.store.move_on(timedelta(**later))
    return await apart.sweep(mesh.store, references)


async def echo(text: str) -> str:
    return text


async def test_what_is_large_comes_back_everywhere_and_stands_in_no_task(large: TaskMesh, stored: Any) -> None:
    seen: list[Task] = []

    def before(task: Task) -> None:
        seen.append(task)

    async def after(task: Task, _: Ending) -> None:
        assert task.params is not None

    @large.task
    async def parent(text: str, of: str) -> str:
        assert of == LARGE
        child = await current_task().start(task, "child", text=text)
        [value] = await current_task().results([child])
        waited = await current_task().dependencies()
        await current_task().publish(task, "published", text=LARGER)
        return f"{value}{waited['echo', 'first']}"

    @large.task
    async def staged(text: str) -> Next:
        return Next(queue="second", params={"text": text + "2"})

    @staged.on_queue("second")
    async def second(text: str) -> str:
        return text

    task = large.task(echo)
    first = await task.publish("first", text=LARGE)
    waiting = parent.configure(after={"of": first})
    [handle] = await waiting.publish_many({"p": {"text": LARGER}})
    moved = await staged.publish("s", text=LARGE)
    async with large.flow("f") as flow:
        member = flow.add(task, "member", text=LARGE)
    async with working(large, "w1", before=before, after=after):
        assert await first.result(60) == LARGE
        assert await handle.result(60) == LARGER + LARGE
        assert await member.result(60) == LARGE
        assert (await finished(large, moved.name, moved.key)).successes[0].returns == LARGE + "2"
        assert (await finished(large, "echo", "published")).successes[0].returns == LARGER
    assert (await large.get("echo", "first")).params == {"text": LARGE}
    assert (await large.get("staged", "s")).stages[0].params == {"text": LARGE}
    assert [each.params async for each in large.find("parent", params=True)] == [{"text": LARGER}]
    assert [each.params for each in seen if each.key == "first"] == [{"text": LARGE}]
    for id_ in ("echo:first", "parent:p", "echo:member"):
        document = await stored.tasks.find_one({"_id": id_})
        assert LARGE[:60] not in repr(document), id_


async def test_more_than_a_document_holds_comes_back_from_any_mesh(
    large: TaskMesh, mongo_uri: str, stored: Any
) -> None:
    blob = bytes(range(256)) * 70_000  # 18 MB
    task = large.task(length)
    handle = await task.publish("k", blob=blob, small="s")
    async with working(large, "w1"):
        assert await handle.result(60) == {"length": len(blob), "small": "s", "blob": blob}
    assert await stored.payloads.count_documents({}) == 2 * (1 + 5)
    async with TaskMesh(mongo_uri, database=large.connection.database) as other:
        assert (await other.get("length", "k")).params == {"blob": blob, "small": "s"}
        async with browser(other) as client:
            page = (await client.get("/api/v1/tasks/length/k")).json()
            assert page["params"] == {"blob": "<17,920,019 bytes, stored apart>", "small": "s"}


async def length(blob: bytes, small: str) -> dict[str, Any]:
    return {"length": len(blob), "small": small, "blob": blob}


async def test_deleted_with_the_task_and_not_left_by_a_publication_that_changed_nothing(
    large: TaskMesh, stored: Any
) -> None:
    task = large.task(echo)
    await task.publish("k", text=LARGE)
    assert await apart_of(stored) == 1
    assert not (await task.publish("k", text=LARGER)).created
    assert await apart_of(stored) == 1, "the key was there"
    async with working(large, "w1"):
        await finished(large, "echo", "k")
    assert await apart_of(stored) == 2
    assert (await large.delete("echo", "k")).params == {"text": LARGE}
    assert await stored.payloads.count_documents({}) == 0


async def test_a_sweep_removes_what_no_task_refers_to_any_more_and_nothing_else(large: TaskMesh, stored: Any) -> None:
    task = large.task(echo)
    keys = ("kept", "expired", "purged", "replaced", "undone")
    for key in keys:
        await task.publish(key, text=LARGE)
    async with working(large, "w1"):
        for key in keys:
            await finished(large, "echo", key)
    assert await apart_of(stored) == 10
    assert await swept(large, minutes=11) == 0, "all are referred to"
    await stored.tasks.delete_one({"_id": "echo:expired"})  # as the TTL monitor does
    assert (await large.bulk.purge("name:echo key:purged", by="me")).done == 1
    deleted = await large.bulk.delete("name:echo key:undone", by="me", undo_ms=86_400_000)
    await task.configure(run_again=True).publish("replaced", text=LARGER)
    assert await swept(large, minutes=1) == 0, "a look is not due yet"
    assert await swept(large, minutes=15) == 0, "seen for the first time"
    assert await swept(large, minutes=2) == 6, "params and results of what expired, was purged and was replaced"
    assert deleted.id is not None
    await large.bulk.undo(deleted.id)
    for key, text in (("kept", LARGE), ("undone", LARGE), ("replaced", LARGER)):
        assert (await large.get("echo", key)).params == {"text": text}
    for _ in range(3):
        assert await swept(large, hours=1) == 0
    assert await apart_of(stored) == 5


async def test_what_a_publisher_that_died_has_left_goes_after_a_day(large: TaskMesh, stored: Any) -> None:
    orphan = apart.Apart(ObjectId(), "echo:never", b"x" * 5_000_000)
    await apart.put(large.store, [orphan])
    await stored.payloads.delete_one({"_id": {"id": orphan.id, "n": 2}})  # it died half-way
    assert await swept(large, hours=12) == 0, "somebody may be about to write the task"
    assert await swept(large, hours=13) == 1
    assert await stored.payloads.count_documents({}) == 0


async def test_a_worker_sweeps(large: TaskMesh, stored: Any) -> None:
    await apart.put(large.store, [apart.Apart(ObjectId(), "echo:never", b"x")])
    large.store.move_on(timedelta(hours=25))
    large.task(echo)

    async def is_empty() -> bool:
        return bool(await stored.payloads.count_documents({}) == 0)

    async with working(large, "w1"):
        await eventually(is_empty)


async def test_what_is_missing_puts_the_task_off_and_charges_nothing(large: TaskMesh, stored: Any) -> None:
    task = large.task(echo)
    handle = await task.publish("k", text=LARGE)
    chunks = await stored.payloads.find().to_list()
    await stored.payloads.delete_many({})

    async def put_off() -> bool:
        return (await handle.task()).task_state.resume_time is not None

    async with working(large, "w1"):
        await eventually(put_off)
        found = await handle.task()
        assert found.status is Status.INIT
        assert found.task_state.worker_states == []
        assert found.params == {"text": f"<{len(chunks[1]['data']):,} bytes, stored apart>"}
        await stored.payloads.insert_many(chunks)
        await large.retry("echo", "k")
        assert await handle.result(60) == LARGE
    await stored.payloads.delete_many({})
    with pytest.raises(PayloadMissing, match="the result of task 'echo' cannot be read"):
        await handle.result(60)


async def test_encrypted_and_secret_values_stay_so_apart(mongo_uri: str, database: str, stored: Any) -> None:
    codec = AESCodec({"2026": bytes(32)}, "2026")
    async with TaskMesh(mongo_uri, database=database, codec=codec, payload_threshold=1_000) as mesh:
        task = mesh.task(reveal)
        handle = await task.publish("k", secret=SecretStr(LARGE), text=LARGER)
        async with working(mesh, "w1"):
            assert await handle.result(60) == LARGE + LARGER
        shown = await handle.task()
        assert shown.params is not None
        assert repr(shown.params["secret"]) == "Secret('**********')"
        assert shown.params["text"] == LARGER
        async with browser(mesh) as client:
            page = (await client.get("/api/v1/tasks/reveal/k")).json()
            assert page["params"] == {"secret": "<encrypted>", "text": "<encrypted>"}
    assert await apart_of(stored) == 3
    assert [each async for each in stored.payloads.find() if b"large" in each.get("data", b"")] == []


async def test_params_of_a_first_stage_outlive_later_ones_apart_and_encrypted(
    mongo_uri: str, database: str, stored: Any
) -> None:
    codec = AESCodec({"2026": bytes(32)}, "2026")
    read: list[str] = []
    async with TaskMesh(mongo_uri, database=database, codec=codec, payload_threshold=1_000) as mesh:

        @mesh.task(queue="first")
        async def staged(text: str, secret: SecretStr) -> str:
            read.append(text + secret.get_secret_value())
            raise Next(queue="last", params={"n": 1})

        @staged.on_queue("last")
        async def last(n: int) -> str:
            return str(n)

        handle = await staged.publish("k", text=LARGE, secret=SecretStr("s"))
        for _ in range(2):
            await mesh.consumer().run(until_idle=True)
            assert await handle.result(60) == "1"
            for _ in range(3):
                assert await swept(mesh, hours=1) == 0, "the first stage refers to it"
            await mesh.retry("staged", "k", fresh=True)
            for _ in range(3):
                assert await swept(mesh, hours=1) == 0, "the task refers to it again"
        await mesh.consumer().run(until_idle=True)
        await staged.configure(run_again=True).publish("k", text=LARGER, secret=SecretStr("t"))
        await mesh.consumer().run(until_idle=True)
        assert [await swept(mesh, hours=1) for _ in range(3)] == [0, 1, 0], "what the publication has replaced goes"
        await mesh.retry("staged", "k", fresh=True)
        await mesh.consumer().run(until_idle=True)
    assert read == [LARGE + "s"] * 3 + [LARGER + "t"] * 2
    assert await apart_of(stored) == 1


async def reveal(secret: SecretStr, text: str) -> str:
    return secret.get_secret_value() + text


async def test_without_a_threshold_nothing_is_stored_apart(mesh: TaskMesh, stored: Any) -> None:
    task = mesh.task(echo)
    async with working(mesh, "w1"):
        assert await (await task.publish("k", text=LARGER)).result(60) == LARGER
    assert "payloads" not in await stored.list_collection_names()


@pytest.mark.parametrize("threshold", [0, 999, True, "1 MB", 1e6])
def test_a_threshold_that_is_none_is_refused(threshold: Any) -> None:
    with pytest.raises(InvalidOption, match="payload_threshold must be a whole number of bytes of at least 1000"):
        TaskMesh(payload_threshold=threshold)
