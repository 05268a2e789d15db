"""The examples of docs/tasks.md work, and its tables of options name every option with its default."""

from __future__ import annotations

import ast
import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection

from taskmesh import Task, TaskMesh, TaskOption
from taskmesh.model.configuration import Configuration
from tests.docs.examples import examples_in
from tests.docs.running import run
from tests.docs.tables import Row, table

DOCUMENT = "docs/tasks.md"
OPTIONS = table(DOCUMENT, "field", "default", "meaning", "example")
SETTINGS = table(DOCUMENT, "setting", "meaning", "example")
NOT_BY_CONFIGURE = {"option", "tuned", "placed"}


def name_in(row: Row, column: str) -> str:
    return row[column].strip("`")


async def defined(mesh: TaskMesh) -> dict[str, Any]:
    namespace: dict[str, Any] = {"mesh": mesh}
    for example in examples_in(DOCUMENT):
        if example.about == "definitions":
            await run(inspect.cleandoc(example.text), namespace, DOCUMENT)
    assert "resize" in namespace
    return namespace


def test_every_option_and_every_setting_is_there_with_its_default() -> None:
    defaults = {name_in(row, "field"): ast.literal_eval(row["default"]) for row in OPTIONS}
    assert defaults == dict(TaskOption())
    settings = {field.name for field in fields(Configuration)} - NOT_BY_CONFIGURE
    assert {name_in(row, "setting") for row in SETTINGS} == settings


async def test_the_example_of_an_option_sets_it(mesh: TaskMesh) -> None:
    namespace = await defined(mesh)
    for row in OPTIONS:
        field, example = name_in(row, "field"), name_in(row, "example")
        assert f"{field}=" in example
        await run(f"result = await {example}.publish({field!r}, path='a.png')", namespace, DOCUMENT)
        option = (await mesh.get("resize", field)).task_option
        assert getattr(option, field) != getattr(TaskOption(), field), "an example shows another value than the default"
        assert option.max_unexpected_retries == (0 if field == "max_unexpected_retries" else 5), "the definition's"


async def test_the_example_of_a_setting_is_taken(mesh: TaskMesh) -> None:
    namespace = await defined(mesh)
    await mesh.publish("extract", "2026-11")  # what the example of `after` waits for
    for row in SETTINGS:
        setting, example = name_in(row, "setting"), name_in(row, "example")
        async with mesh.store.driver.session() as session:
            namespace["session"] = session
            await run(f"result = {example}", namespace, DOCUMENT)
            if setting == "session":
                async with await session.start_transaction():
                    await namespace["result"].publish(setting, path="a.png")
                    assert [task async for task in mesh.find(key_prefix=setting)] == [], "not before the commit"
            else:
                await namespace["result"].publish(setting, path="a.png")
        task = await mesh.get("resize", setting)
        assert_it_is_set(task, setting, getattr(namespace["result"].configuration, setting))


def assert_it_is_set(task: Task, setting: str, value: Any) -> None:
    """What can be seen of a setting in a new task; the others are about keys that exist (test_existing_keys.py)."""
    if setting in ("queue", "group"):
        assert getattr(task, setting) == value
    elif setting in ("start_time", "expire_time"):
        assert isinstance(value, datetime)
        stored = getattr(task.task_state, setting)
        assert abs((stored - value).total_seconds()) < 0.001
    elif setting == "delay_ms":
        assert task.task_state.start_time is not None
        assert (task.task_state.start_time - task.task_state.create_time).total_seconds() >= value / 1000 - 5
    else:
        assert value


@pytest.mark.parametrize("about", ["handler", "batch"])
async def test_the_example_of_a_handler_runs(mesh: TaskMesh, about: str) -> None:
    namespace = await defined(mesh)
    [example] = [example for example in examples_in(DOCUMENT) if example.about == about]
    await run(example.text, namespace, DOCUMENT)


async def test_the_example_of_a_lifespan_runs(mesh: TaskMesh, mongo_uri: str) -> None:
    given = (dataclass, AsyncCollection, AsyncIterator, AsyncMongoClient, Any)
    namespace = {found.__name__: found for found in given} | {"mesh": mesh, "uri": mongo_uri}
    [example] = [example for example in examples_in(DOCUMENT) if example.about == "lifespan"]
    await run(example.text, namespace, DOCUMENT)
    place: Any = namespace["place"]
    handle = await place.publish("order-7", item="a ring")
    await mesh.consumer().run(until_idle=True)
    assert await handle.result(10) >= 1
