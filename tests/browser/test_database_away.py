"""An open page whose database is frozen or killed: it says how old it is, and goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from taskmesh import TaskMesh
from tests.browser.site import opened
from tests.cli.shell import Shell, shell_in
from tests.mongod import Mongod
from tests.web.serving import serve

pytestmark = pytest.mark.browser


@pytest.fixture
def alone(own_mongod: Mongod, tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` on a MongoDB of its own."""
    directory = tmp_path / "shell"
    directory.mkdir()
    with shell_in(directory, own_mongod.uri, "away") as shell:
        yield shell


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_a_page_says_how_old_it_is_while_the_database_is_away_and_goes_on_by_itself(
    how: str, chromium: Browser, alone: Shell, own_mongod: Mongod
) -> None:
    async with TaskMesh(own_mongod.uri, database="away") as mesh:
        await mesh.publish("work", "k", delay_ms=3_600_000)
        started, url = serve(alone)
        context = await chromium.new_context(base_url=url)
        watched = await opened(context, url)
        page = watched.page
        await page.goto("/task?name=work&key=k")
        await expect(page.locator("#live")).to_have_text("live")
        if how == "frozen":
            own_mongod.suspend()
        else:
            await asyncio.to_thread(own_mongod.kill)
        await expect(page.locator("#live")).to_contain_text("s old")
        await expect(page.locator("#silence")).to_contain_text("The database does not answer")
        await expect(page.locator("#head .status").first).to_have_text("scheduled")
        later = await context.new_page()
        await later.goto("/tasks")
        await expect(later.locator("#problem")).to_contain_text("the database has not answered for")
        if how == "frozen":
            own_mongod.resume()
        else:
            await asyncio.to_thread(own_mongod.start)
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator("#silence")).to_be_hidden()
        await expect(later.locator("#listing")).to_contain_text("work")
        await mesh.cancel("work", "k")
        await expect(page.locator("#head .status").first).to_have_text("cancelled")
        await context.close()
        assert watched.wrong == []
        assert started.stop() == 0
