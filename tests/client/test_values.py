"""What users pass comes back as it was, or is refused with a clear error; none of it is ever an operator (trap T46)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any, NotRequired, TypedDict, Unpack
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Base64Str, BaseModel, Field, Json, NaiveDatetime, RootModel, SecretStr, Strict

from taskmesh import InvalidParams, Status, TaskError, TaskFailed, TaskMesh, TaskOption, current_task
from tests.bson_values import TRICKY_TEXTS, as_it_comes_back, texts, values
from tests.working import working

ONCE = TaskOption(max_unexpected_retries=0)
# The database is the same for all examples, on purpose: every example uses keys of its own.
many_examples = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
async def echoing(mesh: TaskMesh) -> AsyncIterator[TaskMesh]:
    """A mesh whose tasks `echo` return their param `value`, with a worker of a tricky name."""

    @mesh.task(option=ONCE)
    async def echo(**params: Any) -> Any:
        return params["value"]

    @mesh.task(option=ONCE)
    async def complain(text: str, *, for_good: bool) -> None:
        raise TaskFailed(text) if for_good else ValueError(text)

    async with working(mesh, "$$NOW $worker.a"):
        yield mesh


@many_examples
@given(st.lists(values, min_size=1, max_size=30))
async def test_t46_params_and_results_come_back_as_they_were(echoing: TaskMesh, some: list[Any]) -> None:
    run = uuid4().hex
    handles = await echoing.definitions["echo"].publish_many(
        {f"{run} {i}": {"value": value, "$set": value, "": "$$NOW"} for i, value in enumerate(some)}
    )
    results = [await handle.result(timeout=60) for handle in handles]
    assert [as_it_comes_back(result) for result in results] == [as_it_comes_back(value) for value in some]
    params = [(await handle.task()).params for handle in handles]
    expected = [{"value": value, "$set": value, "": "$$NOW"} for value in some]
    assert [as_it_comes_back(param) for param in params] == [as_it_comes_back(param) for param in expected]


@many_examples
@given(values)
async def test_t46_new_params_of_an_existing_task_come_back_as_they_were(echoing: TaskMesh, value: Any) -> None:
    key = uuid4().hex
    await echoing.publish("waiting", key, {"value": 0})
    handle = await echoing.publish("waiting", key, {"value": value}, update_existing_params=True)
    assert as_it_comes_back((await handle.task()).params) == as_it_comes_back({"value": value})


@many_examples
@given(st.lists(texts.filter(lambda key: key and "\0" not in key), min_size=1, max_size=10, unique=True))
async def test_t46_any_text_can_be_a_key(echoing: TaskMesh, keys: list[str]) -> None:
    name = f"echo{uuid4().hex}"
    handles = [await echoing.publish(name, key, {"value": key}) for key in keys]
    assert [handle.created for handle in handles] == [True] * len(keys)
    found = [task.key async for task in echoing.find(name, limit=0)]
    assert sorted(found) == sorted(keys)
    for key in keys:
        assert (await echoing.get(name, key)).key == key
        assert key in [task.key async for task in echoing.find(name, key_prefix=key)]
        assert (await echoing.cancel(name, key)).status is Status.CANCELLED


@many_examples
@given(text=texts, for_good=st.booleans())
async def test_t46_error_texts_are_kept_as_they_were(echoing: TaskMesh, text: str, *, for_good: bool) -> None:
    complain = echoing.definitions["complain"]
    handle = await complain.publish(uuid4().hex, text=text, for_good=for_good)
    with pytest.raises(TaskError) as caught:
        await handle.result(timeout=60)
    shown = text.replace("\0", "\\0")
    if for_good:
        assert (await handle.task()).task_state.worker_states[0].fail_reason == (shown or "TaskFailed")
    else:
        assert caught.value.reasons[0].startswith(
            f"$$NOW $worker.a: ValueError{f': {shown}' if shown else ''}".rstrip()
        )


async def test_t46_logs_and_progress_are_kept_as_they_were(mesh: TaskMesh, subtests: pytest.Subtests) -> None:
    @mesh.task
    async def talk() -> None:
        text = TRICKY_TEXTS[int(current_task().key)]
        current_task().log(text)
        await current_task().progress(0.5, text)

    await talk.publish_many({str(number): {} for number in range(len(TRICKY_TEXTS))})
    await mesh.consumer(worker_id="$w").run(until_idle=True)
    for number, text in enumerate(TRICKY_TEXTS):
        with subtests.test(repr(text)):
            task = await mesh.get("talk", str(number))
            assert [line.message for line in task.task_state.worker_states[0].logs] == [text]
            assert task.task_state.progress is not None
            assert (task.task_state.progress.fraction, task.task_state.progress.message) == (0.5, text)


@pytest.mark.parametrize(
    "start_time",
    [
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001  # naive: the same, by contract
        datetime(2200, 1, 1, tzinfo=UTC),
    ],
)
async def test_t46_m32_a_far_start_time_waits_and_harms_nobody(mesh: TaskMesh, start_time: datetime) -> None:
    @mesh.task
    async def job() -> str:
        return "done"

    await job.configure(start_time=start_time).publish("far")
    near = await job.publish("near")
    await mesh.consumer().run(until_idle=True)

    assert await near.result(timeout=60) == "done"
    far = await mesh.get("job", "far")
    assert far.status is Status.INIT
    assert far.task_state.start_time == as_it_comes_back(start_time)[1]


async def test_t46_a_naive_start_time_is_utc(mesh: TaskMesh) -> None:
    naive = datetime.now(UTC).replace(tzinfo=None) + timedelta(days=30)
    await mesh.publish("waiting", "k", start_time=naive, expire_time=naive + timedelta(days=1))
    state = (await mesh.get("waiting", "k")).task_state
    assert state.start_time == as_it_comes_back(naive)[1]
    assert state.expire_time == as_it_comes_back(naive + timedelta(days=1))[1]


class Colour(Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    y: Decimal


@dataclass
class Box:
    corner: Point
    made: date


async def test_annotated_params_reach_the_handler_in_their_own_types(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task
    async def paint(box: Box, colours: set[Colour], path: PurePosixPath, first: int, /, *, wait: timedelta) -> None:
        seen.extend([box, colours, path, first, wait])

    box = Box(Point(x=1, y=Decimal("2.50")), date(2026, 2, 28))
    await paint.publish("k", box, {Colour.RED}, PurePosixPath("/a/b"), 7, wait=timedelta(seconds=90))
    await mesh.consumer().run(until_idle=True)
    assert seen == [box, {Colour.RED}, PurePosixPath("/a/b"), 7, timedelta(seconds=90)]


class Renamed(BaseModel):
    user_name: str = Field(alias="userName")
    made_on: date = Field(alias="madeOn")


class Days(RootModel[dict[str, date]]):
    """A model of one value."""


async def test_params_whose_stored_form_is_another_than_their_fields_come_back(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task
    async def look(
        renamed: Renamed, days: Days, settings: Json[dict[str, int]], text: Base64Str, numbers: Sequence[int]
    ) -> None:
        seen.extend([renamed, days, settings, text, numbers])

    renamed = Renamed.model_validate({"userName": "ada", "madeOn": date(2026, 2, 28)})
    days = Days({"first": date(2026, 3, 1)})
    params = {"renamed": renamed, "days": days, "settings": '{"a": 1}', "text": "YUdWc2JHOD0=", "numbers": (1, 2)}
    await mesh.publish("look", "k", params)
    await mesh.consumer().run(until_idle=True)
    assert seen == [renamed, days, {"a": 1}, "aGVsbG8=", [1, 2]]


async def test_params_without_a_name_of_their_own_reach_the_handler_in_their_annotated_type(mesh: TaskMesh) -> None:
    seen: dict[str, Any] = {}

    @mesh.task
    async def remember(**days: date) -> None:
        seen.update(days)

    await remember.publish("k", first=date(2026, 3, 1))
    await mesh.consumer().run(until_idle=True)
    assert seen == {"first": date(2026, 3, 1)}


async def test_times_that_may_have_no_zone_reach_the_handler_without_one(mesh: TaskMesh) -> None:
    seen: list[Any] = []

    @mesh.task
    async def ring(at: NaiveDatetime, often: list[NaiveDatetime], made: datetime) -> list[NaiveDatetime]:
        seen.extend([at, often, made])
        return often

    local = datetime(2026, 2, 28, 7, 30)  # noqa: DTZ001 -- that is the point
    made = datetime(2026, 2, 28, tzinfo=UTC)
    handle = await ring.publish("k", at=local, often=[local], made=made)
    await mesh.consumer().run(until_idle=True)
    assert await handle.result(timeout=60) == [local]
    assert seen == [local, [local], made]


async def test_params_that_would_not_fit_when_they_come_back_are_refused_at_publish(mesh: TaskMesh) -> None:
    @mesh.task
    async def search(pattern: re.Pattern[str]) -> None: ...

    @mesh.task
    async def search_bytes(pattern: re.Pattern[bytes]) -> None: ...

    @mesh.task
    async def move(to: Annotated[tuple[int, int], Strict()]) -> None: ...

    with pytest.raises(InvalidParams, match=r"pattern=re\.compile.* would not come back"):
        await search.publish("k", pattern=re.compile("a", re.IGNORECASE))
    with pytest.raises(InvalidParams, match=r"pattern=re\.compile.* would not come back"):
        await search_bytes.publish("k", pattern=re.compile(b"a"))
    with pytest.raises(InvalidParams, match=r"to=\(1, 2\) would not come back"):
        await move.publish("k", to=(1, 2))
    assert [task async for task in mesh.find()] == []
    assert (await search.publish("k", pattern=re.compile("(?i)a"))).created


class Filters(TypedDict):
    since: date
    text: NotRequired[str]
    token: NotRequired[SecretStr]


class Paged(Filters, total=False):
    page: int
    days: set[date]


async def test_params_of_an_unpacked_dict_are_checked_and_reach_the_handler_by_its_annotations(mesh: TaskMesh) -> None:
    seen: list[dict[str, Any]] = []

    @mesh.task
    async def search(site: str, **filters: Unpack[Paged]) -> None:
        seen.append({"site": site, **filters})
        current_task().log("with 4111")

    some: dict[str, Any] = {
        "since": date(2026, 3, 1),
        "page": 2,
        "days": {date(2026, 3, 2)},
        "token": SecretStr("4111"),
    }
    handle = await search.publish("all", site="a", **some)
    await search.publish("few", site="b", since=date(2026, 3, 1))
    for misfit, text in (
        ({"since": "never"}, "'since'=.* does not fit"),
        ({"since": date(2026, 3, 1), "page": "two"}, "'page'=.* does not fit"),
        ({"since": date(2026, 3, 1), "colour": "red"}, "there is no parameter 'colour'"),
        ({}, "'since' is missing"),
    ):
        with pytest.raises(InvalidParams, match=text):
            await mesh.publish("search", "misfit", {"site": "a", **misfit})
    with pytest.raises(InvalidParams, match="after names sight, which is no parameter of it"):
        await search.configure(after={"sight": handle}).publish("misfit", site="a", since=date(2026, 3, 1))
    await mesh.consumer().run(until_idle=True)
    assert sorted(seen, key=lambda given: given["site"]) == [
        {"site": "a", **some},
        {"site": "b", "since": date(2026, 3, 1)},
    ]
    [entry] = (await handle.task()).successes
    assert [line.message for line in entry.logs] == ["with **********"], "a secret is one here, too"
