"""What a handler returns comes back as its return annotation says; what cannot, FAILs its task once and for good."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_serializer

from taskmesh import Status, TaskError, TaskMesh, TaskOption, UnstorableValue, current_task
from taskmesh.client.returns import Returns
from tests.consumer import process_handlers
from tests.working import finished, working

AT_ONCE = TaskOption(unexpected_retry_delay_ms=0)
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
SOME_ID = UUID("12345678123456781234567812345678")


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    text: str
    price: Decimal


class Receipt(BaseModel):
    id: UUID
    lines: list[Line]
    colours: set[Colour] = set()
    made: datetime = NOON
    within: timedelta = timedelta(seconds=90)
    raw: bytes = b"\xff\0"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    colour: Colour
    corner: tuple[int, int]


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    repo_id: int = Field(validation_alias="repoId", serialization_alias="repo-id")

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorated properties
    @property
    def twice(self) -> int:
        return 2 * self.repo_id


class Matrix:
    """Nothing that pydantic knows."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows


class Holding(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    matrix: Any

    @field_serializer("matrix")
    def rows(self, matrix: Any) -> Any:
        return matrix.rows if isinstance(matrix, Matrix) else matrix


class Place(NamedTuple):
    x: int
    y: float


RECEIPT = Receipt(id=SOME_ID, lines=[Line("tea", Decimal("2.50"))], colours={Colour.RED})


def receipt() -> Receipt:
    return RECEIPT


def receipt_of_a_dict() -> Receipt:
    return {"id": str(SOME_ID), "lines": [{"text": "tea", "price": "2.50"}], "colours": ["red"]}  # type: ignore[return-value]  # what is tested


def by_colour() -> dict[Colour, list[Line]]:
    return {Colour.RED: [Line("tea", Decimal(1))]}


def by_number() -> dict[int, set[Line]]:
    return {7: {Line("tea", Decimal(1))}}


def strict() -> Strict:
    return Strict(colour=Colour.RED, corner=(1, 2))


def aliased() -> Aliased:
    return Aliased(repo_id=7)


def place() -> Place | None:
    return Place(1, 2.5)


def path() -> PurePosixPath:
    return PurePosixPath("/a/b")


def day() -> date:
    return date(2026, 2, 28)


def long_decimal() -> Decimal:
    return Decimal("3.14159265358979323846264338327950288419716939937510")


def bytes_by_number() -> dict[int, bytes]:
    return {7: b"\xff\0"}


def newest() -> deque[bytes]:
    return deque([b"\xff"])


def pattern() -> re.Pattern[str]:
    return re.compile("(?i)a+")


@pytest.mark.parametrize(
    "fn",
    [
        *(receipt, by_colour, by_number, strict, aliased, place, path, day, long_decimal),
        *(bytes_by_number, newest, pattern),
    ],
    ids=lambda fn: fn.__name__,
)
def test_what_is_stored_is_read_as_the_annotated_type(fn: Any) -> None:
    returns = Returns("the result", fn)
    value = fn()
    back = returns.read(returns.to_store(value))
    assert back == value
    assert type(back) is type(value)


def pattern_with_flags() -> re.Pattern[str]:
    return re.compile("a+", re.IGNORECASE)


def day_or_text() -> date | str:
    return date(2026, 2, 28)


def moment_or_day() -> datetime | date | None:
    return date(2026, 2, 28)


def several_or_one() -> list[int] | set[int]:
    return {1}


def test_what_would_be_read_as_something_else_is_refused() -> None:
    with pytest.raises(UnstorableValue, match=r"the result would not come back as .*the annotation -> "):
        Returns("the result", pattern_with_flags).to_store(pattern_with_flags())


@pytest.mark.parametrize(
    ("fn", "read"),
    [
        (day_or_text, "2026-02-28"),
        (moment_or_day, NOON.replace(month=2, day=28, hour=0, tzinfo=None)),
        (several_or_one, [1]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_stored_like_a_value_of_another_annotated_type_is_read_as_that(fn: Any, read: Any) -> None:
    """The work is done: better so than not at all."""
    returns = Returns("the result", fn)
    assert returns.read(returns.to_store(fn())) == read


def day_or_none() -> date | None:
    return date(2026, 2, 28)


def day_or_moment() -> date | datetime:
    return NOON


def place_or_text() -> Place | str:
    return Place(1, 2.5)


def colour_or_number() -> Colour | int:
    return Colour.RED


@pytest.mark.parametrize(
    "fn", [day_or_none, day_or_moment, place_or_text, colour_or_number], ids=lambda fn: fn.__name__
)
def test_a_result_of_several_types_keeps_its_own(fn: Any) -> None:
    returns, value = Returns("the result", fn), fn()
    assert returns.read(returns.to_store(value)) == value


async def test_a_result_comes_back_as_the_annotated_type(mesh: TaskMesh) -> None:
    @mesh.task
    async def shop() -> Receipt:
        return RECEIPT

    mesh.task(receipt_of_a_dict)
    mesh.task(by_number)

    @mesh.task
    async def held() -> Holding:
        return Holding(matrix=Matrix([[1, 2]]))

    handles = [await mesh.publish(name, "k") for name in ("shop", "receipt_of_a_dict", "by_number", "held")]
    async with working(mesh, "w"):
        assert await handles[0].result(60) == await handles[1].result(60) == RECEIPT
        assert await handles[0].results(60) == {"w": RECEIPT}
        assert await handles[2].result(60) == {7: {Line("tea", Decimal(1))}}
        assert await handles[3].result(60) == Holding(matrix=[[1, 2]])
        stored = (await mesh.get("shop", "k")).successes[0].returns
    assert stored["id"] == SOME_ID, "MongoDB's own types stay"
    assert stored["made"] == NOON
    assert stored["colours"] == ["red"]

    elsewhere = TaskMesh(mesh.connection.client, database=mesh.connection.database)
    async with elsewhere:
        handle = await elsewhere.publish("shop", "k")
        assert await handle.result(60) == stored, "plain values where the handler is not known"


async def test_without_an_annotation_plain_values_come_back(mesh: TaskMesh) -> None:
    @mesh.task
    async def job():  # type: ignore[no-untyped-def]  # what is tested
        return {"line": Line("tea", Decimal("2.5")), "colours": {Colour.RED}, "id": SOME_ID, "on": date(2026, 2, 28)}

    async with working(mesh):
        value = await (await job.publish("k")).result(60)
    assert value == {
        "line": {"text": "tea", "price": Decimal("2.5")},
        "colours": ["red"],
        "id": SOME_ID,
        "on": "2026-02-28",
    }


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({1: {SOME_ID: b"\xff"}}, {"1": {str(SOME_ID): b"\xff"}}),
        ({Colour.RED: None, None: 1}, {"red": None, "None": 1}),
        (bytearray(b"\xff"), b"\xff"),
        (memoryview(b"\xff"), b"\xff"),
        (range(2), [0, 1]),
        ({"a": b"\xff"}.values(), [b"\xff"]),
        (deque([NOON]), [NOON]),
    ],
    ids=lambda value: type(value).__name__,  # the text of some has an address in it, which differs in each process
)
def test_without_an_annotation_what_python_has_more_becomes_plain(value: Any, plain: Any) -> None:
    assert Returns("the result").to_store(value) == plain


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {(1, object()): "a"}, {object(): "a"}])
def test_keys_that_no_text_stands_for_alone_are_refused(value: Any) -> None:
    with pytest.raises(UnstorableValue, match=r"a key of a dict must be a str, got (int|tuple|object): make it"):
        Returns("the result").to_store(value)


def test_a_refusal_does_not_show_the_value() -> None:
    class Account:
        def __repr__(self) -> str:
            return "top secret"

    with pytest.raises(UnstorableValue, match="cannot store a value of type Account: use a dict") as caught:
        Returns("the result").to_store([Account()])
    assert "top secret" not in str(caught.value)


async def test_what_does_not_fit_fails_once_and_its_value_is_not_told(mesh: TaskMesh) -> None:
    runs: list[str] = []

    @mesh.task(option=AT_ONCE)
    async def misfit() -> Receipt:
        runs.append("misfit")
        return {"id": "top secret", "lines": []}  # type: ignore[return-value]  # what is tested

    @mesh.task(option=AT_ONCE)
    async def unstorable() -> Any:
        runs.append("unstorable")
        return {"deep": [object()]}

    @mesh.task(option=AT_ONCE)
    async def in_a_block() -> int:
        async with current_task().transaction():
            runs.append("in_a_block")
            current_task().set_result("many")
        return 1

    mesh.task(process_handlers.not_a_number, run="process", option=AT_ONCE)
    async with working(mesh):
        for name in ("misfit", "unstorable", "in_a_block", "not_a_number"):
            handle = await mesh.publish(name, "k")
            with pytest.raises(TaskError, match=f"the result of task '{name}'") as caught:
                await handle.result(60)
            assert "top secret" not in str(caught.value)
            task = await finished(mesh, name, "k")
            assert (task.status, len(task.task_state.worker_states)) == (Status.FAIL, 1), "run once"
    assert runs == ["misfit", "unstorable", "in_a_block"]


async def test_a_child_process_returns_the_annotated_type_too(mesh: TaskMesh) -> None:
    ended: list[Any] = []
    measure = mesh.task(process_handlers.measured, run="process")
    async with working(mesh, after=lambda _task, ending: ended.append(ending.value)):
        value = await (await measure.publish("k")).result(60)
    assert value == process_handlers.Measured(process_handlers.Unit.METRE, {1, 2})
    assert ended == [value], "as the hook sees it"


async def test_a_stored_result_that_fits_no_more_is_told(mesh: TaskMesh) -> None:
    async def count() -> int:
        return 7

    async def count_of_today() -> list[str]:
        return ["7"]

    job = mesh.task(count, name="count")
    async with working(mesh):
        handle = await job.publish("k")
        assert await handle.result(60) == 7
    async with TaskMesh(mesh.connection.client, database=mesh.connection.database) as changed:
        handle_now = await changed.task(count_of_today, name="count").publish("k")
        with pytest.raises(UnstorableValue, match=r"does not fit the annotation -> list\[str\] \(any more\)"):
            await handle_now.result(60)
