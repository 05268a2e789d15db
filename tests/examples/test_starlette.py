"""The Starlette example: one process serves pages and does the work."""

from __future__ import annotations

from types import ModuleType

import httpx
import pytest

from tests.examples.web import imported, served, told
from tests.waiting import eventually


@pytest.fixture
def example(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("examples.starlette.app", monkeypatch, mongo_uri, database)


async def test_what_is_put_is_counted_once_and_can_be_read(example: ModuleType) -> None:
    async with served(example.app) as http:
        first = await http.put("/texts/poem", content="a rose\nis a rose\n")
        again = await http.put("/texts/poem", content="a rose\nis a rose\n")
        assert (first.status_code, first.json()["created"], again.json()["created"]) == (202, True, False)

        async def counted() -> httpx.Response | None:
            answer = await http.get("/texts/poem")
            return answer if answer.status_code == 200 else None

        assert (await eventually(counted, what="the text is counted")).json() == {"a": 2, "rose": 2, "is": 1}
        assert (await http.get("/texts/none")).status_code == 404
        [worker] = await example.mesh.workers()
        assert worker.state == "running"


async def test_a_client_that_listens_is_told_what_happens(example: ModuleType) -> None:
    async with served(example.app) as http, http.stream("GET", "/events") as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": listening"
        await http.put("/texts/poem", content="a rose")
        kinds = []
        async for event in told(lines):
            assert event["key"] == "poem"
            kinds.append(event["kind"])
            if event["kind"] == "finished":
                break
    assert {"published", "claimed", "succeeded"} <= set(kinds)
