"""What cannot be published is refused with a sentence that names the value, and nothing is written."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Annotated, Any, cast

import pytest
from pydantic import AfterValidator, BaseModel
from pymongo import MongoClient

from taskmesh import (
    InvalidKey,
    InvalidName,
    InvalidOption,
    InvalidParams,
    TaskDefinition,
    TaskHandle,
    TaskMesh,
    TaskNotFound,
    TaskOption,
    TaskTooLarge,
)

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def database(mongo_uri: str) -> Iterator[str]:
    """One for all these tests, since none of them writes."""
    name = f"test_{uuid.uuid4().hex[:16]}"
    yield name
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        client.drop_database(name)


@pytest.fixture(autouse=True)
async def _nothing_is_written(mesh: TaskMesh) -> AsyncIterator[None]:
    yield
    assert await mesh.store.driver.collection("tasks").count_documents({}) == 0


@pytest.fixture
def resize(mesh: TaskMesh) -> TaskDefinition[..., Any]:
    @mesh.task
    async def resize(path: str, width: int = 200, **more: Any) -> None:
        del path, width, more

    return resize


BAD_KEYS: list[Any] = [
    ("", "'' is empty"),
    ("a\0b", "has a NUL"),
    ("k" * 513, "has 513 bytes"),
    ("ü" * 257, "has 514 bytes"),
    ("half \ud800 a pair", "half a surrogate pair"),
    (17, "must be a str, got int 17"),
    (b"k", "must be a str, got bytes"),
    (None, "must be a str, got NoneType None"),
]


async def test_a_key_that_has_no_hash_is_refused_without_an_event_loop_too(resize: TaskDefinition[..., Any]) -> None:
    key: Any = ["k"]
    with pytest.raises(InvalidKey, match=r"must be a str, got list \['k'\]"):
        await asyncio.to_thread(resize.publish_sync, key, path="a.png")


async def test_a_bad_key_is_refused_wherever_it_is_given(
    mesh: TaskMesh, resize: TaskDefinition[..., Any], subtests: pytest.Subtests
) -> None:
    for key, complaint in BAD_KEYS:
        with subtests.test(key=key, complaint=complaint):
            with pytest.raises(InvalidKey, match=complaint):
                await resize.publish(key, path="a.png")
            with pytest.raises(InvalidKey, match=complaint):
                await resize.publish_many({"good": {"path": "a.png"}, key: {"path": "b.png"}})
            with pytest.raises(InvalidKey, match=complaint):
                await mesh.publish("unknown", key)
            with pytest.raises(InvalidKey, match=complaint):
                await asyncio.to_thread(resize.publish_sync, key, path="a.png")
            for verb in (mesh.get, mesh.cancel, mesh.retry, mesh.delete, mesh.explain, mesh.set_option):
                with pytest.raises(InvalidKey, match=complaint):
                    await verb("resize", key)


BAD_NAMES: list[Any] = ["", "a:b", "a b", "ü", "a/b", "n" * 101, "$where", "a\0", "a\n", 5]


async def test_a_bad_name_is_refused(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    for name in BAD_NAMES:
        with subtests.test(name=name):
            with pytest.raises(InvalidName, match="a task's name must be 1 to 100 characters of letters"):
                await mesh.publish(name, "k")
            with pytest.raises(InvalidName):
                await mesh.get(name, "k")

            async def function() -> None: ...

            with pytest.raises(InvalidName):
                mesh.task(name=name)(function)
    nameless: Any = partial(print, "a")
    with pytest.raises(InvalidName, match="has no name that the task could have: give it one by name="):
        mesh.task(nameless)


async def test_params_that_do_not_fit_the_signature_are_refused_by_name_and_value(
    mesh: TaskMesh,
) -> None:
    @mesh.task
    async def crop(path: str, width: int = 200) -> None:
        del path, width

    anything: TaskDefinition[..., Any] = crop
    with pytest.raises(InvalidParams, match="'path' is missing"):
        await anything.publish("k")
    with pytest.raises(InvalidParams, match="'width'='wide' does not fit"):
        await anything.publish("k", path="a.png", width="wide")
    with pytest.raises(InvalidParams, match=r"there is no parameter 'height' \(given: 3\)"):
        await anything.publish("k", path="a.png", height=3)
    with pytest.raises(InvalidParams, match="too many positional arguments"):
        await anything.publish("k", "a.png", 3, 4)
    with pytest.raises(InvalidParams, match=r"'path' is missing \(key 'bad'; none of these 2 was published\)"):
        await anything.publish_many({"good": {"path": "a"}, "bad": {}})
    for what in ("crop", "unknown"):
        with pytest.raises(InvalidParams, match=r"params must be a dict by parameter name, got list \[3\] \(key 'bad'"):
            await mesh.publisher.publish_many(what, {"good": {"path": "a"}, "bad": cast("Any", [3])})
    with pytest.raises(InvalidParams, match="got NoneType None"):
        await anything.publish_many({"bad": cast("Any", None)})
    neithers: list[Any] = [["k"], {"k"}, "k", None]
    for neither in neithers:
        with pytest.raises(InvalidParams, match="publish_many takes a dict of params by key, got"):
            await anything.publish_many(neither)
    with pytest.raises(InvalidParams, match="'path' is missing"):
        await mesh.publish("crop", "k", {})


UNSTORABLE: list[Any] = [
    (2**63, r"params\.deep\[1\]\.x: 9223372036854775808 does not fit into 64 bits"),
    (-(2**63) - 1, "does not fit into 64 bits"),
    ({object(): "a"}, r"params\.deep\[1\]\.x\[<obj.*\]: a key of a dict must be a str, got object: make it a str"),
    ({"a\0b": 1}, "must not have a NUL"),
    ("half \ud800 a pair", "is not valid Unicode text"),
    (object(), "cannot store a value of type object: use a dict"),
    ([{"$ref": "users", "$id": 7}], r"params\.deep\[1\]\.x\[0\]: a dict with `\$ref` and `\$id` would come back"),
]


async def test_params_that_mongodb_cannot_store_are_refused_with_their_path(
    mesh: TaskMesh, resize: TaskDefinition[..., Any], subtests: pytest.Subtests
) -> None:
    for value, complaint in UNSTORABLE:
        with subtests.test(value=value, complaint=complaint):
            with pytest.raises(InvalidParams, match=complaint):
                await resize.publish("k", path="a", deep=[0, {"x": value}])
            with pytest.raises(InvalidParams, match=complaint):
                await mesh.publish("unknown", "k", {"deep": [0, {"x": value}]})


async def test_what_is_passed_by_position_and_by_name_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def greet(name: str, /, **more: Any) -> None:
        del name, more

    with pytest.raises(InvalidParams, match="got name by position and by name, and params are stored by name"):
        await greet.publish("k", "ada", name="bob")


async def test_params_without_a_name_of_their_own_are_checked_as_they_are_annotated(mesh: TaskMesh) -> None:
    @mesh.task
    async def add(first: int, **more: int) -> None:
        del first, more

    anything: TaskDefinition[..., Any] = add
    with pytest.raises(InvalidParams, match="'second'='two' does not fit"):
        await anything.publish("k", first=1, second="two")


async def test_a_value_that_would_come_back_as_something_else_is_refused(
    mesh: TaskMesh, resize: TaskDefinition[..., Any]
) -> None:
    with pytest.raises(InvalidParams, match=r"number=\(1\+2j\) would not come back from MongoDB as it is"):
        await resize.publish("k", path="a", number=1 + 2j)
    with pytest.raises(InvalidParams, match=r"params\.number: MongoDB cannot store a value of type complex"):
        await mesh.publish("unknown", "k", {"number": 1 + 2j})


class Doubled(BaseModel):
    number: Annotated[int, AfterValidator(lambda number: 2 * number)]


async def test_a_value_that_its_annotation_changes_each_time_is_refused(mesh: TaskMesh) -> None:
    @mesh.task
    async def double(number: Annotated[int, AfterValidator(lambda number: 2 * number)]) -> None:
        del number

    @mesh.task
    async def double_in_a_model(doubled: Doubled) -> None:
        del doubled

    with pytest.raises(InvalidParams, match="number=6 would not come back from MongoDB as it is"):
        await double.publish("k", 3)
    with pytest.raises(InvalidParams, match=r"doubled=Doubled\(number=6\) would not come back from MongoDB as it is"):
        await double_in_a_model.publish("k", Doubled(number=3))


async def test_params_that_hold_themselves_are_refused(mesh: TaskMesh) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidParams, match=r"nested too deeply \(or holding itself\)"):
        await mesh.publish("unknown", "k", {"endless": endless})


async def test_params_that_are_no_mapping_are_refused(mesh: TaskMesh) -> None:
    with pytest.raises(InvalidParams, match="params must be a dict by parameter name, got list"):
        await mesh.publish("unknown", "k", [1, 2])  # type: ignore[arg-type]  # that is the point


TOO_LARGE: list[Any] = [15 * MEGABYTE + 1, 16 * MEGABYTE, 20 * MEGABYTE]


async def test_a_document_near_16_mb_is_refused_as_too_large(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    @mesh.task
    async def swallow(blob: bytes) -> None:
        del blob

    for size in TOO_LARGE:
        with subtests.test(size=size):
            with pytest.raises(TaskTooLarge, match=r"params has \d+ bytes, more than the 15000000 that fit"):
                await swallow.publish("k", blob=bytes(size))
            with pytest.raises(TaskTooLarge):
                await mesh.publish("unknown", "k", {"blob": bytes(size)})


BAD_OPTIONS: list[Any] = [
    ("priority", 2**31),
    ("priority", 1.5),
    ("priority", True),
    ("concurrent_worker_cnt", 0),
    ("concurrent_worker_cnt", -1),
    ("specific_worker_ids", ("",)),
    ("specific_worker_ids", (1,)),
    ("ping_interval_ms", 0),
    ("ping_interval_ms", -1),
    ("worker_timeout_ms", 0),
    ("worker_timeout_ms", "60000"),
    ("max_unexpected_retries", -1),
    ("unexpected_retry_delay_ms", -1),
    ("unexpected_retry_delay_ms", 10**18),
    ("unexpected_retry_delay_scope", "fleet"),
    ("unexpected_retry_backoff", 0.5),
    ("unexpected_retry_backoff", float("nan")),
    ("unexpected_retry_backoff", float("inf")),
    ("unexpected_retry_jitter", -0.1),
    ("unexpected_retry_jitter", 1.1),
    ("max_timeouts", -1),
    ("run_timeout_ms", 0),
    ("retain_success_ms", -1),
    ("retain_failed_ms", -1),
    ("on_fail", "two words"),
    ("no_such_option", 1),
]


async def test_m25_an_option_out_of_range_is_refused_with_its_name_and_value(
    mesh: TaskMesh, resize: TaskDefinition[..., Any], subtests: pytest.Subtests
) -> None:
    for field, value in BAD_OPTIONS:
        with subtests.test(field=field, value=value):
            with pytest.raises(InvalidOption, match=field):
                TaskOption(**{field: value})
            with pytest.raises(InvalidOption, match=field):
                resize.configure(**{field: value})
            with pytest.raises(InvalidOption, match=field):
                await mesh.publish("unknown", "k", {}, **{field: value})


BAD_LEASES: list[Any] = [(1_000, 1_000), (2_000, 1_000), (30_000, 29_999)]


async def test_m25_a_lease_not_longer_than_its_ping_interval_is_refused_with_both_values(
    mesh: TaskMesh, resize: TaskDefinition[..., Any], subtests: pytest.Subtests
) -> None:
    for ping, timeout in BAD_LEASES:
        with subtests.test(ping=ping, timeout=timeout):
            both = rf"worker_timeout_ms \({timeout}\) must be more than ping_interval_ms \({ping}\)"
            with pytest.raises(InvalidOption, match=both):
                TaskOption(ping_interval_ms=ping, worker_timeout_ms=timeout)
            with pytest.raises(InvalidOption, match=both):
                resize.configure(ping_interval_ms=ping, worker_timeout_ms=timeout)
            with pytest.raises(InvalidOption, match=both):
                await mesh.publish("unknown", "k", {}, ping_interval_ms=ping, worker_timeout_ms=timeout)


async def test_m25_a_bad_pair_is_refused_by_set_option_too_and_changes_nothing(mesh: TaskMesh) -> None:
    await mesh.publish("unknown", "k", {}, ping_interval_ms=1_000, worker_timeout_ms=3_000)
    before = await mesh.get("unknown", "k")
    with pytest.raises(InvalidOption, match=r"worker_timeout_ms \(500\) .* ping_interval_ms \(1000\)"):
        await mesh.set_option("unknown", "k", worker_timeout_ms=500)
    with pytest.raises(InvalidOption, match="max_timeouts=-1"):
        await mesh.set_option("unknown", "k", max_timeouts=-1)
    with pytest.raises(InvalidOption, match="unknown option 'colour'"):
        await mesh.set_option("unknown", "k", colour="red")  # type: ignore[call-arg]  # that is the point
    assert await mesh.get("unknown", "k") == before
    await mesh.delete("unknown", "k")
    with pytest.raises(TaskNotFound):
        await mesh.set_option("unknown", "k", priority=1)


async def test_a_ping_interval_that_nobody_has_set_follows_the_lease(mesh: TaskMesh) -> None:
    await mesh.publish("unknown", "k")
    changed = (await mesh.set_option("unknown", "k", worker_timeout_ms=5_000)).task_option
    assert changed == TaskOption(worker_timeout_ms=5_000)
    assert (await mesh.set_option("unknown", "k", worker_timeout_ms=900_000)).task_option.ping_interval_ms == 30_000
    await mesh.delete("unknown", "k")


BAD_SETTINGS: list[Any] = [
    {"start_time": "tomorrow"},
    {"expire_time": 1_700_000_000},
    {"start_time": datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-5)))},
    {"delay_ms": -1},
    {"delay_ms": 1.5},
    {"delay_ms": 10**15},
    {"delay_ms": 5, "start_time": datetime(2030, 1, 1, tzinfo=UTC)},
    {"queue": ""},
    {"queue": "a b"},
    {"run_again": 1},
    {"colour": "red"},
]


async def test_a_bad_setting_is_refused(
    mesh: TaskMesh, resize: TaskDefinition[..., Any], subtests: pytest.Subtests
) -> None:
    for configuration in BAD_SETTINGS:
        with subtests.test(configuration=configuration):
            with pytest.raises(InvalidOption):
                resize.configure(**configuration)
            with pytest.raises(InvalidOption):
                await mesh.publish("unknown", "k", {}, **configuration)


async def test_bad_arguments_of_a_consumer_are_refused(mesh: TaskMesh, resize: TaskDefinition[..., Any]) -> None:
    assert resize.name == "resize"
    for concurrency in (0, -1, 1.5, True, "2"):
        with pytest.raises(InvalidOption, match="concurrency must be a whole number from 1"):
            mesh.consumer(concurrency=concurrency)  # type: ignore[arg-type]  # that is the point
    for worker_id in ("", "w" * 257, "a\nb", 5):
        with pytest.raises(InvalidOption, match="worker_id must be a printable text of 1 to 256 characters"):
            mesh.consumer(worker_id=worker_id)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InvalidOption, match="no handler is defined for crop; there are: resize"):
        mesh.consumer(names=["crop"])


async def test_a_bad_definition_is_refused(mesh: TaskMesh) -> None:
    def plain() -> None: ...
    async def coroutine() -> None: ...

    with pytest.raises(
        InvalidOption, match="run='async' cannot run a plain function: leave run out, or use 'thread' or 'process'"
    ):
        mesh.task(run="async")(plain)
    with pytest.raises(InvalidOption, match="run='thread' cannot run an async function: leave run out, or use 'async'"):
        mesh.task(run="thread")(coroutine)
    with pytest.raises(InvalidOption, match="option must be a TaskOption"):
        mesh.task(option={"priority": 1})(coroutine)  # type: ignore[call-overload]  # that is the point
    with pytest.raises(TypeError, match=r"takes \*args"):
        mesh.task(_takes_positional)
    mesh.task(coroutine)
    with pytest.raises(InvalidOption, match="'coroutine' is defined already"):
        mesh.task(coroutine)


async def _takes_positional(*args: int) -> None:
    del args


async def test_what_a_consumer_cannot_be_told_is_refused(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    make: Any = mesh.consumer
    for hook in ("on_claim", "before", "after"):
        with subtests.test(hook), pytest.raises(InvalidOption, match=f"the hook {hook} must be a function, got 3"):
            make(**{hook: 3})
    with pytest.raises(InvalidOption, match="listen must be True or False, got 'no'"):
        make(listen="no")
    consumer = make()
    for grace in (-1, "30", None, 1.5, True):
        with subtests.test(grace=grace), pytest.raises(InvalidOption, match=f"0 or more, got {grace!r}"):
            await consumer.stop(grace_ms=grace)
    assert consumer.state == "ready"


async def test_what_is_no_time_to_wait_is_refused(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    handle: Any = TaskHandle(mesh.tasks, "job", "k", created=True, updated=False, warnings=[])
    for timeout in ("5", timedelta(seconds=5), float("nan"), True):
        with subtests.test(timeout=timeout), pytest.raises(InvalidOption, match="timeout must be a number of seconds"):
            await handle.result(timeout=timeout)


async def test_what_cannot_be_looked_for_is_refused(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    find: Any = mesh.find
    bad: list[tuple[str, Any]] = [*(("limit", limit) for limit in (-1, "x", 1.5, True)), ("status", 3), ("tags", 3)]
    for name, value in bad:
        with subtests.test(name=name, value=value), pytest.raises(InvalidOption, match=f"got {value!r}"):
            [task async for task in find(**{name: value})]


async def test_a_place_that_mongodb_does_not_have_is_refused(mongo_uri: str, subtests: pytest.Subtests) -> None:
    bad: list[tuple[str, Any]] = [("database", name) for name in (None, 3, "", "a b", "d" * 64)]
    bad += [("collection", name) for name in (None, "", "$x", "system.tasks")]
    for name, value in bad:
        with subtests.test(name=name, value=value), pytest.raises(InvalidName, match=f"{name} must"):
            await TaskMesh(mongo_uri, **{name: value}).connect()
