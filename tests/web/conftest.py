"""A browser without scripts: an HTTP client in front of the app, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from taskmesh import TaskMesh
from taskmesh.admin import listing
from taskmesh.web import create_app, pages

ORIGIN = "http://127.0.0.1:8080"


def browser(mesh: TaskMesh, **settings: Any) -> httpx.AsyncClient:
    """Return a client of a new app, that says of itself what a browser on the app's own pages says."""
    transport = httpx.ASGITransport(create_app(mesh, **settings), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers={"Origin": ORIGIN})


@pytest.fixture(autouse=True)
def _the_server_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pages leave out while the server is busy, they show here: how many fit, and the newest first."""
    for module, budget in ((pages, "_COUNT_WITHIN_MS"), (pages, "_FITS_WITHIN_MS"), (listing, "_NEWEST_WITHIN_MS")):
        monkeypatch.setattr(module, budget, 30_000)


@pytest.fixture
async def client(mesh: TaskMesh) -> AsyncIterator[httpx.AsyncClient]:
    """A browser on an app without a token."""
    async with browser(mesh) as client:
        yield client
