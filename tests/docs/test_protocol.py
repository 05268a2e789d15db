"""docs/protocol.md says what is so: its updates do what the engine does, its schema takes what is stored and refuses the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import bson
import jsonschema_rs
import pytest
from bson import Timestamp, json_util
from pymongo import MongoClient
from pymongo.collection import Collection

from taskmesh import TaskMesh, TaskOption, current_task
from taskmesh.client.acceptance import SETTINGS
from taskmesh.model.task import Task
from tests.docs.examples import ROOT, examples_in
from tests.docs.running import run
from tests.waiting import eventually
from tests.working import finished, working

DOCUMENT = "docs/protocol.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}
SCHEMA = json.loads((ROOT / "docs/task.schema.json").read_text("utf-8"))
VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


@pytest.fixture
def tasks(mongo_uri: str, database: str) -> Iterator[Collection[dict[str, Any]]]:
    with MongoClient[dict[str, Any]](mongo_uri, tz_aware=True) as client:
        yield client[database]["tasks"]


def as_json(document: Any) -> Any:
    """A document in relaxed Extended JSON."""
    return json.loads(json_util.dumps(document, json_options=json_util.RELAXED_JSON_OPTIONS))


async def _in_a_thread(example: str, **names: Any) -> dict[str, Any]:
    """Run an example of a blocking driver beside the event loop."""
    namespace: dict[str, Any] = {"bson": bson, "Timestamp": Timestamp, **names}
    await anyio.to_thread.run_sync(lambda: anyio.run(run, EXAMPLES[example].in_place, namespace, DOCUMENT))
    return namespace


async def test_the_insert_of_the_page_is_a_task(mesh: TaskMesh, tasks: Collection[dict[str, Any]]) -> None:
    @mesh.task
    async def resize(path: str, width: int) -> str:
        return f"{path} {width}"

    async with working(mesh):
        await _in_a_thread("insert", tasks=tasks)
        task = await finished(mesh, "resize", "img-42")
    assert task.successes[0].returns == "a.png 300"
    assert (task.task_option.priority, task.tags, task.extra) == (5, ["import"], {"repo_id": 7})
    await _in_a_thread("past", tasks=tasks)
    assert (await mesh.get("resize", "img-42")).key == "img-42", "its retention is not over"


async def test_the_signal_of_the_page_does_what_pythons_does(mesh: TaskMesh, tasks: Collection[dict[str, Any]]) -> None:
    @mesh.task
    async def order() -> Any:
        return await current_task().wait_for("approved", timeout_ms=3_600_000)

    payload = {"by": "ann", "n": [1, 2]}
    async with working(mesh):
        for key in ("7", "8"):
            await order.publish(key)
        await eventually(lambda: _both_suspended(mesh))
    await _in_a_thread("signal", tasks=tasks, payload=payload)
    await mesh.signal("order", "8", "approved", payload, signal_id="order-7-approved")
    stored = [await mesh.store.driver.collection("tasks").find_one({"_id": f"order:{key}"}) for key in ("7", "8")]
    for task in stored:
        assert task["event"].startswith("signalled\x1f")
        assert task["next_claim_time"] == task["task_state"]["suspended_until"]
        assert task["task_state"]["suspended_until"] <= datetime.now(UTC) + timedelta(seconds=5)
        assert (task["status"], task["queue"], task["task_state"]["worker_states"]) == ("INIT", "default", [])
    again = await _in_a_thread("signal", tasks=tasks, payload=payload)
    assert again["result"].matched_count == 0, "it is not sent twice"
    async with working(mesh):
        ended = [await finished(mesh, "order", key) for key in ("7", "8")]
    assert [task.successes[0].returns for task in ended] == [payload, payload]
    # Python's ends the wait itself, the page's is taken from the mailbox by who waits: what is recorded is the same.
    stored = [await mesh.store.driver.collection("tasks").find_one({"_id": f"order:{key}"}) for key in ("7", "8")]
    same = [[task["task_state"]["steps"][0][name] for name in ("value", "signal_id", "size")] for task in stored]
    assert same[0] == same[1]
    assert stored[0]["task_state"]["steps_bytes"] == stored[1]["task_state"]["steps_bytes"]


async def _both_suspended(mesh: TaskMesh) -> bool:
    return all([(await mesh.get("order", key)).task_state.suspended_for is not None for key in ("7", "8")])


async def test_the_schema_takes_whatever_python_stores(mesh: TaskMesh, tasks: Collection[dict[str, Any]]) -> None:
    @mesh.task
    async def job(n: int = 0) -> int:
        return n

    until = datetime(2100, 1, 1, tzinfo=UTC)
    option = TaskOption(
        specific_worker_ids=["w1"], run_timeout_ms=5, retain_success_ms=None, unexpected_retry_delay_scope="worker"
    )
    every: list[dict[str, Any]] = [
        {},
        option.stored(),
        {"start_time": until, "expire_time": until, "group": "g", "queue": "q"},
        {"delay_ms": 5, "tags": ["a", "é"], "fields": {"repo": {"a": [1]}}, "needs": {"gpu": True, "n": 1}},
        {"sequence_key": "s", "on_sequence_failure": "block"},
        {"debounce_ms": 5, "debounce_max_ms": 10},
        {"throttle_ms": 5},
    ]
    for n, settings in enumerate(every):
        await job.configure(**settings).publish(f"k:{n}\n", n=n)
    await job.configure(after=[("job", "k:0\n")]).publish("after")
    async with working(mesh):
        await job.publish("done", n=1)
        await finished(mesh, "job", "done")
    await mesh.cancel("job", "k:2\n")
    stored = [as_json(task) for task in tasks.find()]
    assert len(stored) == len(every) + 2
    for task in stored:
        VALIDATOR.validate(task)
        assert "queue" in task


def test_the_schema_knows_every_option_setting_and_field() -> None:
    known = SCHEMA["$defs"]["option"]["properties"]
    told = TaskOption.model_json_schema()["properties"]
    assert known.keys() == told.keys()
    for name, default in TaskOption().stored().items():
        assert {**told[name], "default": default} == {**known[name], "title": told[name]["title"]}, name
    assert SCHEMA["$defs"]["configuration"]["properties"].keys() == SETTINGS
    theirs = {"_id", "name", "key", "params", "status", "configuration", "publish_time", "task_state", "event"}
    refused = {name for name, rule in SCHEMA["$defs"]["insert"]["properties"].items() if rule is False}
    assert refused == Task.OWN_FIELDS - theirs
    page = (ROOT / DOCUMENT).read_text("utf-8")
    assert [name for name in sorted(refused) if f"`{name}`" not in page] == []


GOOD: dict[str, Any] = {"_id": "job:k", "name": "job", "key": "k", "status": "INIT"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"params": {"n": 1}, "mine": 7, "publish_time": Timestamp(0, 0)},
        {"configuration": {"priority": -1, "delay_ms": 0, "start_time": None, "tags": ["a"], "run_timeout_ms": None}},
        {"configuration": {"start_time": datetime(2030, 1, 1, tzinfo=UTC), "needs": {"gpu": True}}},
    ],
    ids=["least", "own", "settings", "times"],
)
def test_the_schema_takes_inserts(fields: dict[str, Any]) -> None:
    VALIDATOR.validate(as_json(GOOD | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"_id": 7},
        {"_id": "job"},
        {"name": "a b"},
        {"key": ""},
        {"status": "SUCCESS"},
        {"params": [1]},
        {"publish_time": datetime(2030, 1, 1, tzinfo=UTC)},
        {"configuration": {"priority": "high"}},
        {"configuration": {"priority": 2**40}},
        {"configuration": {"run_again": True}},
        {"configuration": {"start_time": "tomorrow"}},
        {"configuration": {"start_time": datetime(2030, 1, 1, tzinfo=UTC), "delay_ms": 5}},
        {"tags": ["a"]},
        {"lane": 5},
        {"queue": "default"},  # a stored task, then: with all that belongs to one
    ],
    ids=str,
)
def test_the_schema_refuses_what_a_worker_would_refuse(fields: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(as_json(GOOD | fields))
