"""Values that a codec encrypts: they come back where the key is, and stand nowhere in the clear."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from bson.raw_bson import RawBSONDocument
from pydantic import SecretStr
from pymongo import AsyncMongoClient, MongoClient

from taskmesh import (
    AESCodec,
    CannotDecrypt,
    Encrypted,
    InvalidOption,
    Next,
    PayloadMissing,
    Retry,
    Status,
    TaskDefinition,
    TaskError,
    TaskFailed,
    TaskHandle,
    TaskMesh,
    TaskOption,
    current_task,
)
from tests.cli.shell import Shell
from tests.consumer import process_handlers
from tests.waiting import eventually
from tests.web.conftest import browser
from tests.working import finished, working

MARK = "walnut"
"""Stands in every value of these tests, and nowhere else."""
TEXT_KEY = AESCodec.new_key()
KEYS: dict[str, bytes | str] = {"2025": TEXT_KEY, "2026": bytes(range(32))}
OLD = AESCodec({"2025": KEYS["2025"]}, "2025")
BOTH = AESCodec(KEYS, "2026")
NEW = AESCodec({"2026": KEYS["2026"]}, "2026")
AT_ONCE = TaskOption(unexpected_retry_delay_ms=0, max_unexpected_retries=1)
VALUES: list[Any] = [
    f"{MARK} ünïcödé",
    17,
    2.5,
    True,
    False,
    None,
    b"\0walnut",
    datetime(2026, 11, 22, 12, tzinfo=UTC),
    Decimal("1.10"),
    UUID("12345678123456781234567812345678"),
    [MARK, [1, {"deep": MARK}]],
    {MARK: {"$set": MARK}, "empty": {}, "none": []},
]


@asynccontextmanager
async def meshed(uri: str, database: str, codec: AESCodec | None) -> AsyncIterator[TaskMesh]:
    async with TaskMesh(uri, database=database, codec=codec) as mesh:
        yield mesh


def in_the_clear(uri: str, database: str, text: str = MARK) -> list[str]:
    """Where the text stands in the database, by collection and `_id`: in whatever field."""
    found = []
    with MongoClient[RawBSONDocument](uri, document_class=RawBSONDocument) as client:
        for name in client[database].list_collection_names():
            found += [f"{name} {each['_id']}" for each in client[database][name].find() if text.encode() in each.raw]
    return found


def everything(mesh: TaskMesh) -> list[TaskDefinition[..., Any]]:
    """Define tasks that leave what they are given wherever a task can leave anything."""

    @mesh.task
    async def child(text: str) -> str:
        if text.startswith("bad"):
            raise TaskFailed(f"refused {text}")
        return text

    @mesh.task(option=AT_ONCE)
    async def all_of_it(values: list[Any], more: dict[str, Any]) -> dict[str, Any]:
        task = current_task()
        if task.attempt == 1:
            raise Retry(f"once more, {MARK}")
        await task.progress(0.5, f"half {MARK}")
        task.log(f"line {MARK}")
        stepped = await task.step("make", dict, {"step": values})
        with pytest.raises(TaskFailed, match=MARK):
            await task.step("fail", failing)
        signal = await task.wait_for("go")
        started = [await task.start(child, "good", text=MARK), await task.start(child, "bad", text=f"bad {MARK}")]
        good, bad = await task.results(started, return_errors=True)
        await task.publish(child, "published", text=MARK)
        assert isinstance(bad, TaskError)
        assert MARK in str(bad)
        assert MARK in bad.reasons[0]
        return {"values": values, "more": more, "stepped": stepped, "signal": signal, "good": good}

    async def failing() -> None:
        raise TaskFailed(f"failed {MARK}")

    @mesh.task
    async def after(text: str, fed: dict[str, Any]) -> Any:
        assert text == MARK
        return fed["more"], [value["more"] for value in (await current_task().dependencies()).values()]

    @mesh.task
    async def staged(text: str) -> Next:
        return Next(queue="second", params={"number": f"{text} 2"})

    @staged.on_queue("second")
    async def second(number: str) -> str:
        return number

    return [child, all_of_it, after, staged]


async def test_every_kind_of_value_comes_back_and_none_is_in_the_database_in_the_clear(
    mongo_uri: str, database: str
) -> None:
    async with meshed(mongo_uri, database, BOTH) as mesh:
        child, all_of_it, after, staged = everything(mesh)
        in_a_child = mesh.task(process_handlers.keep_a_secret, name="in_a_child", run="process")
        mesh.every("child", interval_ms=3_600_000, params={"text": MARK}, schedule_id="hourly")

        more = {"nested": MARK, "n": 1}
        handle = await all_of_it.publish("k", values=VALUES, more=more)
        assert handle.warnings != [], "nobody has the key yet"
        last = await after.configure(after={"fed": handle}).publish("k", text=MARK)
        next_one = await staged.publish("k", text=MARK)
        tried = await in_a_child.publish("k", card=SecretStr(f"card {MARK}"), text=MARK)
        async with mesh.flow("f") as flow:
            flow.add(child, "member", text=MARK)
        assert (await child.publish("twice", text=MARK)).created
        assert (await child.configure(update_existing_params=True).publish("twice", text=f"{MARK} 2")).updated
        async with working(mesh, "w1"):
            await handle.signal("go", {"signal": MARK})
            triggered = await mesh.schedules.trigger("hourly")
            assert await handle.result(60) == {
                "values": VALUES,
                "more": more,
                "stepped": {"step": VALUES},
                "signal": {"signal": MARK},
                "good": MARK,
            }
            assert await last.result(60) == [more, [more]]
            assert await next_one.result(60) == f"{MARK} 2"
            assert await tried.result(60) == {"stepped": f"step {MARK}", "card": f"card {MARK}"}
            assert await triggered.result(60) == MARK
            assert (await finished(mesh, "child", "published")).successes[0].returns == MARK
            assert (await finished(mesh, "child", "twice")).successes[0].returns == f"{MARK} 2"
            with pytest.raises(TaskError, match=f"refused bad {MARK}"):
                await (await child.publish("bad", text="")).result(60)
        # What there is to be seen of a task, where the key is.
        task = await mesh.get("all_of_it", "k")
        assert task.params == {"values": VALUES, "more": more}
        assert task.task_state.progress is not None
        assert task.task_state.progress.message == f"half {MARK}"
        [failed, success] = task.task_state.worker_states
        assert failed.fail_message == f"once more, {MARK}"
        assert [line.message for line in success.logs] == [f"line {MARK}"]
        assert {step.name: step.value for step in task.steps if step.kind == "step"}["make"] == {"step": VALUES}
        assert [step.error for step in task.steps if step.name == "fail"] == [f"failed {MARK}"]
        assert (await mesh.get("staged", "k")).stages[0].params == {"text": MARK}
        assert [each.params async for each in mesh.find("child", key_prefix="good", params=True)] == [{"text": MARK}]
        assert (await mesh.schedules.all())[0].params == {"text": MARK}
        # What people do leaves copies and notes.
        await mesh.bulk.retry("name:child", by="me")
        await mesh.retry("all_of_it", "k")
        await mesh.signal("all_of_it", "k", "unread", MARK)
        assert (await mesh.get("all_of_it", "k")).task_state.signals[0].payload == MARK
        report = await mesh.inspect.errors()
        assert [group.message for group in report.groups if MARK in group.message] == []
        assert (await mesh.bulk.delete("name:staged", by="me")).done == 1
        assert in_the_clear(mongo_uri, database) == []


async def test_after_a_rotation_old_tasks_are_read_with_the_old_key_and_new_ones_need_the_new_one(
    mongo_uri: str, database: str
) -> None:
    async with meshed(mongo_uri, database, OLD) as old, meshed(mongo_uri, database, BOTH) as both:
        for mesh in (old, both):
            mesh.task(echo)
        before = await old.publish("echo", "before", {"text": MARK})
        after = await both.publish("echo", "after", {"text": MARK})
        async with working(old, "old"):
            await finished(old, "echo", "before")
            [why] = await old.explain("echo", "after")
            assert [gate.name for gate in why.gates if not gate.open] == ["labels"]
            assert "encryption-key:2026" in next(gate.reason for gate in why.gates if not gate.open)
            async with working(both, "both"):
                assert await after.result(60) == MARK
        assert (await both.get("echo", "before")).successes[0].returns == MARK
        assert await before.result(60) == MARK
        # A new execution of an old task encrypts with the new key, and the old one can go when the last of its tasks has.
        async with working(both, "both"):
            again = await both.publish("echo", "before", {"text": f"{MARK} 2"}, run_again=True)
            assert await again.result(60) == f"{MARK} 2"
    async with meshed(mongo_uri, database, NEW) as new:
        task = await new.get("echo", "before")
        assert task.params == {"text": f"{MARK} 2"}
        assert task.successes[-1].returns == f"{MARK} 2"


async def echo(text: str) -> str:
    return text


async def test_who_has_not_the_key_sees_that_a_value_is_encrypted_and_with_which_key(
    mongo_uri: str, database: str
) -> None:
    async with meshed(mongo_uri, database, NEW) as mesh:
        mesh.task(echo)
        async with working(mesh, "w1"):
            await (await mesh.publish("echo", "k", {"text": MARK})).result(60)
    async with meshed(mongo_uri, database, None) as stranger:
        task = await stranger.get("echo", "k")
        assert task.params == {"text": "<encrypted>"}
        assert isinstance(task.params["text"], Encrypted)
        assert task.params["text"].key_id == "2026"
        assert task.successes[0].returns == "<encrypted>"
        with pytest.raises(
            CannotDecrypt, match=r"the result of task 'echo' 'k': encrypted with key '2026'.*no codec"
        ) as no:
            await TaskHandle(stranger.tasks, "echo", "k", created=False, updated=False, warnings=[]).result(60)
        assert no.value.key_id == "2026"
        with pytest.raises(InvalidOption, match="task 'echo' is encrypted by its workers"):
            await stranger.publish("echo", "in the clear", {"text": MARK})
    assert in_the_clear(mongo_uri, database) == []


async def test_the_web_says_that_a_key_is_missing_and_not_that_the_database_is_away(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = TaskMesh(mongo_uri, database=database, codec=NEW)
    mesh.task(echo)
    mesh.every("echo", interval_ms=86_400_000, params={"text": MARK}, schedule_id="hourly")
    async with mesh:
        pass
    async with meshed(mongo_uri, database, None) as stranger, browser(stranger) as client:
        told = await client.post("/api/v1/schedules/hourly/trigger", json={})
        assert (told.status_code, told.json()["error"]) == (422, "CannotDecrypt")

        async def missing(*_: object) -> None:
            raise PayloadMissing("its 5,000 bytes are not there")

        monkeypatch.setattr("taskmesh.admin.inspection.read_timeline", missing)
        page = await client.get("/task", params={"name": "echo", "key": "k"})
        assert page.status_code == 422
        assert "its 5,000 bytes are not there" in page.text
        assert "does not answer" not in page.text


async def test_a_worker_whose_key_is_another_under_the_same_id_puts_the_task_off_and_charges_nothing(
    mongo_uri: str, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = AESCodec({"2026": AESCodec.new_key()}, "2026")
    option = TaskOption(max_unexpected_retries=0, unexpected_retry_delay_ms=0)
    async with meshed(mongo_uri, database, NEW) as right, meshed(mongo_uri, database, wrong) as mesh:
        mesh.task(echo, option=option)
        right.task(echo, option=option)
        handle = await right.publish("echo", "k", {"text": MARK})
        caplog.set_level(logging.ERROR)
        async with working(mesh, "wrong"):
            await eventually(lambda: "put off" in caplog.text, what="it is put off")
            assert "encrypted with another key '2026'" in caplog.text
            await eventually(resumes_later(mesh, "echo", "k"), what="that is recorded")
            task = await mesh.get("echo", "k")
            assert task.status is Status.INIT
            assert task.task_state.worker_states == []
        await mesh.retry("echo", "k")
        async with working(right, "right"):
            assert await handle.result(60) == MARK
        assert (await right.get("echo", "k")).task_state.lost_cnt == 0


async def test_a_resumed_task_whose_records_need_another_key_runs_no_step_again(mongo_uri: str, database: str) -> None:
    made: list[str] = []

    def define(mesh: TaskMesh) -> None:
        @mesh.task
        async def order(text: str) -> str:
            value = await current_task().step("make", make, text)
            await current_task().wait_for("go")
            return value

        async def make(text: str) -> str:
            made.append(text)
            return f"made {text}"

    async with meshed(mongo_uri, database, BOTH) as both, meshed(mongo_uri, database, OLD) as old:
        define(both)
        define(old)
        handle = await old.publish("order", "k", {"text": MARK})
        async with working(both, "both"):
            await eventually(waits(both, "order", "k"), what="it waits")
        async with working(old, "old"):
            await handle.signal("go")
            await eventually(resumes_later(old, "order", "k"), what="it is put off")
        await both.retry("order", "k")
        async with working(both, "both"):
            await finished(both, "order", "k")
        assert (await both.get("order", "k")).successes[0].returns == f"made {MARK}"
        assert made == [MARK]


def waits(mesh: TaskMesh, name: str, key: str) -> Any:
    async def asked() -> bool:
        return (await mesh.get(name, key)).task_state.suspended_for is not None

    return asked


def resumes_later(mesh: TaskMesh, name: str, key: str) -> Any:
    async def asked() -> bool:
        return (await mesh.get(name, key)).task_state.resume_time is not None

    return asked


async def test_a_task_may_have_a_codec_of_its_own(mongo_uri: str, database: str) -> None:
    async with meshed(mongo_uri, database, None) as mesh:
        sealed = mesh.task(echo, name="sealed", codec=NEW)
        plain = mesh.task(echo, name="plain")
        async with working(mesh, "w1"):
            assert await (await sealed.publish("k", text=MARK)).result(60) == MARK
            assert await (await plain.publish("k", text=MARK)).result(60) == MARK
            assert await asyncio.to_thread(lambda: sealed.publish_sync("sync", text=MARK).created)
        assert in_the_clear(mongo_uri, database) == ["tasks plain:k"]
        assert (await mesh.get("plain", "k")).needs == {}


async def test_no_value_can_be_put_in_the_place_of_another(mongo_uri: str, database: str) -> None:
    async with meshed(mongo_uri, database, NEW) as mesh, AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        mesh.task(echo)
        for key in ("mine", "yours"):
            await mesh.publish("echo", key, {"text": f"{MARK} {key}"})
        tasks = client[database]["tasks"]
        mine = await tasks.find_one({"_id": "echo:mine"})
        assert mine is not None
        await tasks.update_one({"_id": "echo:yours"}, {"$set": {"params.text": mine["params"]["text"]}})
        assert (await mesh.get("echo", "yours")).params == {"text": "<encrypted>"}
        await tasks.update_one({"_id": "echo:mine"}, {"$set": {"params.other": mine["params"]["text"]}})
        assert (await mesh.get("echo", "mine")).params == {"text": f"{MARK} mine", "other": "<encrypted>"}


async def test_pages_and_commands_decrypt_nothing_though_their_mesh_has_the_key(
    taskmesh: Shell, mongo_uri: str, database: str
) -> None:
    async with meshed(mongo_uri, database, NEW) as mesh:
        mesh.task(echo, option=AT_ONCE)
        failing = mesh.task(fail, option=AT_ONCE)
        async with working(mesh, "w1"):
            await (await mesh.publish("echo", "k", {"text": MARK})).result(60)
            await failing.publish("k", text=MARK)
            await finished(mesh, "fail", "k")
        async with browser(mesh) as client:
            for path in (
                "/",
                "/tasks",
                "/task?name=echo&key=k",
                "/task?name=fail&key=k",
                "/errors",
                "/api/v1/tasks/echo/k",
                "/api/v1/tasks",
            ):
                answer = await client.get(path)
                assert answer.status_code == 200, (path, answer.text)
                assert MARK not in answer.text, path
                assert "tm1:" not in answer.text, path
            assert "&lt;encrypted&gt;" in (await client.get("/task?name=echo&key=k")).text
            assert (await client.get("/api/v1/tasks/fail/k")).json()["params"] == {"text": "<encrypted>"}
        assert (await mesh.get("echo", "k")).params == {"text": MARK}, "code that asks the same mesh is given it"
    app = taskmesh.directory / "sealed.py"
    app.write_text(
        "from taskmesh import AESCodec, TaskMesh\n"
        "mesh = TaskMesh(codec=AESCodec({'2026': bytes(range(32))}, '2026'))\n"
        "@mesh.task\n"
        "async def echo(text: str) -> str:\n"
        "    return text\n"
    )
    for command in (
        ["show", "echo", "k"],
        ["result", "echo", "k"],
        ["ls", "--params"],
        ["errors"],
        ["show", "fail", "k"],
    ):
        said = await asyncio.to_thread(taskmesh, *command, "--app", "sealed:mesh")
        assert MARK not in said.out, command
        assert "tm1:" not in said.out, command
        assert "<encrypted>" in said.out, command


async def fail(text: str) -> None:
    raise ValueError(f"bad {text}")


@pytest.mark.parametrize(
    ("keys", "current", "said"),
    [
        ({"a": b"short"}, "a", "the key 'a' must be 16, 24 or 32 bytes.*got 5 bytes"),
        ({"a": "no base64!"}, "a", "the key 'a' must be"),
        ({"a": bytes(32)}, "b", "current must be the id of one of the keys, 'a', got 'b'"),
        ({"a=b": bytes(32)}, "a=b", "must not have a '='"),
        ({"": bytes(32)}, "", "the id of a key"),
        ([bytes(32)], "a", "keys must be a mapping"),
    ],
)
def test_a_codec_that_cannot_work_is_refused(keys: Any, current: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        AESCodec(keys, current)


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(InvalidOption, match="codec must be an AESCodec"):
        TaskMesh(codec=KEYS)  # type: ignore[arg-type]  # the mistake of the test
    with pytest.raises(InvalidOption, match="codec must be an AESCodec"):
        TaskMesh().task(echo, codec=AESCodec)  # type: ignore[call-overload]  # as above
    assert "'2025', '2026'" in repr(BOTH)
    assert TEXT_KEY not in repr(BOTH)
