"""What the browser tests share: one fleet with its dashboard, one Chromium, and a fresh page for each test."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from playwright.async_api import Browser, Page, ViewportSize, async_playwright, expect
from pymongo import MongoClient

from taskmesh import TaskMesh
from tests.browser.site import Site, opened
from tests.cli.shell import shell_in

PATIENCE_MS = 20_000.0
"""How long a page may take to show what it should: the machine may be busy."""
DESKTOP = ViewportSize(width=1280, height=800)


@pytest.fixture(scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """Debian's Chromium, headless. `CHROMIUM` names another executable."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the browser tests need Chromium: apt-get install chromium, or name one in CHROMIUM")
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        # Root in a container has no sandbox; the pages are our own.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture(scope="session")
def site(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The fleet that all tests share: workers photo-1 and photo-2, and the dashboard. Tests use keys of their own."""
    database = f"test_{uuid.uuid4().hex[:16]}"
    directory = tmp_path_factory.mktemp("site")
    with shell_in(directory, mongo_uri, database) as shell:
        site = Site(shell, directory / "doors")
        for worker_id in ("photo-1", "photo-2"):
            site.hire(worker_id, "--concurrency", "20")
        site.url = site.serve()
        site.staffed("photo-1", "photo-2")
        yield site
    with MongoClient[dict[str, object]](mongo_uri) as client:
        client.drop_database(database)


@pytest.fixture
async def shop(site: Site) -> AsyncIterator[TaskMesh]:
    """A mesh on the shared fleet's database, to publish to it and to see what became of it."""
    async with site.mesh() as mesh:
        yield mesh


@pytest.fixture
async def page(chromium: Browser, site: Site) -> AsyncIterator[Page]:
    """A fresh browser window on the dashboard. The test fails if anything in it went wrong unseen."""
    context = await chromium.new_context(base_url=site.url, viewport=DESKTOP, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    watched = await opened(context, site.url)
    yield watched.page
    await context.close()
    assert watched.wrong == []
