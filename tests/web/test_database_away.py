"""The dashboard while its database is frozen or killed: answers come within seconds and say so; then it goes on by itself."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from taskmesh import TaskMesh
from tests.mongod import Mongod
from tests.waiting import eventually
from tests.web.conftest import browser

SOON_S = 10.0
"""Two seconds, and what a busy machine adds. The driver would wait for thirty, and before a frozen server for ever."""


async def asked(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Ask, and expect an answer soon, whatever it is."""
    begun = time.monotonic()
    answer = await client.get(path)
    assert time.monotonic() - begun < SOON_S
    return answer


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_a_page_says_within_seconds_that_the_database_is_away_and_comes_back(
    how: str, own_mongod: Mongod
) -> None:
    async with TaskMesh(own_mongod.uri, database="away") as mesh:
        await mesh.publish("work", "k")
        async with browser(mesh) as client:
            assert (await asked(client, "/tasks")).status_code == 200
            if how == "frozen":
                own_mongod.suspend()
            else:
                await asyncio.to_thread(own_mongod.kill)

            async def is_away() -> bool:
                return (await asked(client, "/readyz")).status_code == 503

            await eventually(is_away)
            page = await asked(client, "/tasks")
            assert page.status_code == 503
            assert "the database has not answered for" in page.text
            assert 'data-watch="away"' in page.text
            told = await asked(client, "/api/v1/tasks/work/k")
            assert (told.status_code, told.json()["error"]) == (503, "DatabaseUnavailable")
            assert (await asked(client, "/livez")).status_code == 200
            if how == "frozen":
                own_mongod.resume()
            else:
                await asyncio.to_thread(own_mongod.start)

            async def is_back() -> bool:
                return (await asked(client, "/task?name=work&key=k")).status_code == 200

            await eventually(is_back)
            assert (await asked(client, "/readyz")).status_code == 200


async def test_a_database_that_was_never_there_is_told_at_once_though_the_driver_waits_for_it(
    own_mongod: Mongod,
) -> None:
    own_mongod.suspend()
    mesh = TaskMesh(own_mongod.uri, database="away")
    async with browser(mesh) as client:
        assert (await asked(client, "/readyz")).status_code == 503
        page = await asked(client, "/")
        assert page.status_code == 503
        assert "no MongoDB server has answered yet" in page.text
        own_mongod.resume()

        async def is_there() -> bool:
            return (await asked(client, "/")).status_code == 200

        await eventually(is_there)
    await mesh.close()
