"""Params and results annotated as secrets: the handler has them, and nobody is shown them."""

from __future__ import annotations

import asyncio
import logging
from datetime import date

import pytest
from pydantic import BaseModel, Secret, SecretBytes, SecretStr

from taskmesh import Ending, InvalidParams, Status, Task, TaskMesh, TaskOption, current_task
from tests.cli.shell import Shell
from tests.consumer import process_handlers
from tests.web.conftest import browser
from tests.working import finished, working

PIN = "hunter22"
ONCE = TaskOption(max_unexpected_retries=0)


class Login(BaseModel):
    user: str
    password: SecretStr
    since: Secret[date] = Secret(date(2026, 1, 1))


async def enter(login: Login, token: SecretStr, realm: str = "here") -> str:
    assert login.password.get_secret_value() == token.get_secret_value() == PIN
    assert login.since.get_secret_value() == date(2026, 1, 1)
    task = current_task()
    task.log(f"logs in as {login!r}")
    task.log(f"careless: {token.get_secret_value()}")
    await task.progress(0.5, f"with {PIN}")
    return realm


async def break_in(token: SecretStr) -> None:
    raise ValueError(f"no such token: {token.get_secret_value()}")


async def given(login: Login) -> Login:
    return login


def params() -> dict[str, object]:
    return {"login": Login(user="ann", password=SecretStr(PIN)), "token": PIN}


async def test_a_handler_is_given_secrets_and_whoever_looks_is_not(
    mesh: TaskMesh, taskmesh: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    mesh.task(enter)
    mesh.task(break_in, option=ONCE)
    seen: list[Task] = []

    def after(task: Task, _: Ending) -> None:
        seen.append(task)

    caplog.set_level(logging.DEBUG)
    async with working(mesh, "w1", after=after):
        assert await (await mesh.publish("enter", "k", params())).result(60) == "here"
        await mesh.publish("break_in", "k", {"token": PIN})
        failed = await finished(mesh, "break_in", "k")
    assert failed.status is Status.FAIL
    assert "no such token: **********" in failed.fail_reasons[0]
    task = await mesh.get("enter", "k")
    assert PIN not in repr(task)
    assert PIN not in repr(seen)
    assert PIN not in caplog.text
    [first, second] = task.task_state.worker_states[0].logs
    assert "password=SecretStr('**********')" in first.message
    assert second.message == "careless: **********"
    assert task.params is not None
    assert task.params["token"].get_secret_value() == PIN, "code that asks for it is told"
    assert task.params["login"].get_secret_value()["password"] == PIN
    async with browser(mesh) as client:
        for path in (
            "/tasks",
            "/task?name=enter&key=k",
            "/task?name=break_in&key=k",
            "/errors",
            "/api/v1/tasks/enter/k",
        ):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert PIN not in answer.text, path
        assert (await client.get("/api/v1/tasks/enter/k")).json()["params"] == {
            "login": "**********",
            "token": "**********",
            "realm": "here",
        }
    for command in (["show", "enter", "k"], ["ls", "--params"], ["show", "break_in", "k"]):
        said = await asyncio.to_thread(taskmesh.done, *command)
        assert PIN not in said.out, command


async def test_a_secret_result_comes_back_as_it_is_annotated_and_is_not_shown(mesh: TaskMesh, taskmesh: Shell) -> None:
    task = mesh.task(given)
    unannotated = mesh.task(lambda: SecretStr(PIN), name="unannotated")
    async with working(mesh, "w1"):
        login = await (await task.publish("k", Login(user="ann", password=SecretStr(PIN)))).result(60)
        assert login == Login(user="ann", password=SecretStr(PIN))
        assert (await (await unannotated.publish("k")).result(60)).get_secret_value() == PIN
    assert PIN not in repr(await mesh.get("given", "k"))
    assert PIN not in (await asyncio.to_thread(taskmesh.done, "result", "given", "k")).out


async def test_secrets_of_bytes_and_those_that_begin_alike_have_stars_in_what_is_told(mesh: TaskMesh) -> None:
    @mesh.task
    async def tell(short: SecretStr, long: SecretStr, raw: SecretBytes) -> None:
        current_task().log(long.get_secret_value())
        current_task().log(raw.get_secret_value().decode())
        current_task().log(f"{raw.get_secret_value()!r} of {short.get_secret_value()}")

    handle = await mesh.publish("tell", "k", {"short": PIN, "long": PIN + "-and-more", "raw": b"a key of bytes"})
    await mesh.consumer().run(until_idle=True)
    [entry] = (await handle.task()).task_state.worker_states
    assert [line.message for line in entry.logs] == ["**********", "**********", "b'**********' of **********"]


async def test_a_secret_reaches_a_child_process_and_stays_one(mesh: TaskMesh) -> None:
    task = mesh.task(process_handlers.keep_a_secret, run="process")
    async with working(mesh, "w1"):
        handle = await task.publish("k", card=SecretStr(PIN), text="text")
        assert (await handle.result(60))["card"] == PIN
    entry = (await handle.task()).task_state.worker_states[0]
    assert entry.logs[0].message == "log text **********"


async def test_secrets_without_a_name_of_their_own_are_secrets(mesh: TaskMesh, mongo_uri: str) -> None:
    @mesh.task
    async def remember(**pins: SecretStr) -> bool:
        return all(pin.get_secret_value() == PIN for pin in pins.values())

    async with working(mesh, "w1"), TaskMesh(mongo_uri, database=mesh.connection.database) as stranger:
        own = await remember.publish("k", ann=SecretStr(PIN), bob=SecretStr(PIN))
        other = await stranger.publish("remember", "stranger's", {"ann": PIN})
        assert [await handle.result(60) for handle in (own, other)] == [True, True]
        assert PIN not in repr([await own.task(), await other.task()])


async def test_what_does_not_fit_beside_a_secret_is_named_without_the_values(mesh: TaskMesh) -> None:
    task = mesh.task(enter)
    with pytest.raises(InvalidParams) as refused:
        await mesh.publish("enter", "k", {"login": {"user": 7, "password": PIN}, "token": [PIN], "wrong": PIN})
    assert PIN not in str(refused.value)
    assert "'token'=**********" in str(refused.value)
    assert "'login.user'" in str(refused.value)
    assert task.params.secrets() == ["login", "token"]


async def test_who_publishes_by_name_alone_publishes_a_secret_as_one(mesh: TaskMesh, mongo_uri: str) -> None:
    mesh.task(enter)
    async with working(mesh, "w1"), TaskMesh(mongo_uri, database=mesh.connection.database) as stranger:
        handle = await stranger.publish("enter", "k", {"login": {"user": "ann", "password": PIN}, "token": PIN})
        assert await handle.result(60) == "here"
        assert PIN not in repr(await stranger.get("enter", "k"))


async def test_a_schedule_keeps_a_secret(mesh: TaskMesh) -> None:
    mesh.task(enter)
    await mesh.every("enter", interval_ms=3_600_000, params=params())
    assert PIN not in repr(await mesh.schedules.all())
    handle = await mesh.schedules.trigger("enter")
    async with working(mesh, "w1"):
        assert await handle.result(60) == "here"
    assert PIN not in repr(await handle.task())
