"""What several callers ask at one moment is one call, and each hears what it would have heard alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pymongo.errors import AutoReconnect

from taskmesh import TaskMesh
from taskmesh.store.grouped import Grouped
from tests.waiting import eventually


class _Asked(Grouped[str, list[str]]):
    """Notes what it is called for, and answers when it may."""

    def __init__(self, mesh: TaskMesh) -> None:
        super().__init__(mesh.store)
        self.calls: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def call(self, keys: Sequence[str], /) -> Mapping[str, list[str]]:
        self.calls.append(list(keys))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return {key: [key] for key in keys if key != "missing"}


class _Copying(_Asked):
    copied = True


@pytest.fixture
async def asked(mesh: TaskMesh) -> _Asked:
    return _Asked(mesh)


async def test_what_comes_at_one_moment_is_one_call_and_each_key_is_in_it_once(asked: _Asked) -> None:
    asked.may_answer.set()
    first, second = await asyncio.gather(asked.of(["a", "missing"]), asked.of(["b", "a"]))
    assert asked.calls == [["a", "missing", "b"]]
    assert (first["a"], second["a"], second["b"]) == (["a"], ["a"], ["b"])
    assert "missing" not in first


async def test_a_question_is_never_answered_by_a_call_that_was_under_way(asked: _Asked) -> None:
    first = asyncio.create_task(asked.of(["a"]))
    await eventually(lambda: asked.calls, what="the first call")
    second = asyncio.create_task(asked.of(["a"]))
    await asyncio.sleep(0)
    asked.may_answer.set()
    await asyncio.gather(first, second)
    assert asked.calls == [["a"], ["a"]]


async def test_a_call_that_takes_long_holds_up_no_other(asked: _Asked) -> None:
    first = asyncio.create_task(asked.of(["a"]))
    await eventually(lambda: asked.calls, what="the first call")
    second = asyncio.create_task(asked.of(["b"]))
    await eventually(lambda: len(asked.calls) == 2, what="the second, beside it")
    assert not first.done()
    asked.may_answer.set()
    await asyncio.gather(first, second)


async def test_what_a_cancelled_caller_asked_is_not_called_any_more(asked: _Asked) -> None:
    callers = [asyncio.create_task(asked.of([key])) for key in "abc"]
    await asyncio.sleep(0)  # each has asked, and nothing is called before the next turn
    callers[1].cancel()
    asked.may_answer.set()
    await asyncio.wait(callers)
    assert callers[1].cancelled()
    assert asked.calls == [["a", "c"]]


async def test_an_error_is_told_to_each_and_the_next_call_is_another(asked: _Asked) -> None:
    asked.error = AutoReconnect("gone")
    asked.may_answer.set()
    errors = await asyncio.gather(asked.of(["a"]), asked.of(["b"]), return_exceptions=True)
    assert [str(error) for error in errors] == ["gone", "gone"]
    assert errors[0] is not errors[1]  # a traceback of its own
    asked.error = None
    assert (await asked.of(["a"]))["a"] == ["a"]


async def test_many_of_one_caller_are_a_call_of_their_own(asked: _Asked) -> None:
    many = [str(n) for n in range(101)]
    asked.may_answer.set()
    await asyncio.gather(asked.of(["a"]), asked.of(many), asked.of(["b"]))
    assert sorted(asked.calls, key=len) == [["a", "b"], many]


@pytest.mark.parametrize(("kind", "shared"), [(_Asked, True), (_Copying, False)])
async def test_what_callers_may_change_is_copied_for_each(
    mesh: TaskMesh, kind: Callable[[TaskMesh], Any], shared: bool
) -> None:
    asked = kind(mesh)
    asked.may_answer.set()
    first, second = await asyncio.gather(asked.of(["a"]), asked.of(["a"]))
    assert first["a"] == second["a"] == ["a"]
    assert (first["a"] is second["a"]) is shared
