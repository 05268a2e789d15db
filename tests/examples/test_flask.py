"""The Flask example: it publishes without an event loop, and its page shows the result when a worker has come to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.examples.web import imported


@pytest.fixture
def example(mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = imported("examples.flask.app", monkeypatch, mongo_uri, database)
    yield module
    module.mesh.publisher.close_sync()


async def work(mesh: Any) -> None:
    """Do what there is, as a worker does."""
    async with mesh:
        await mesh.consumer().run(until_idle=True)


def test_the_page_waits_for_the_result_and_shows_it(example: ModuleType) -> None:
    browser = example.app.test_client()
    assert b"<form" in browser.get("/").data
    sent = browser.post("/", data={"below": "100"})
    assert sent.status_code == 303
    before = browser.get(sent.location).text
    assert "<h1>INIT</h1>" in before
    assert 'http-equiv="refresh"' in before
    asyncio.run(work(example.mesh))
    after = browser.get(sent.location).text
    assert "<h1>SUCCESS</h1>" in after
    assert "25 primes" in after
    assert 'http-equiv="refresh"' not in after


def test_a_key_that_nobody_has_published_is_not_found(example: ModuleType) -> None:
    assert example.app.test_client().get("/results/none").status_code == 404


async def test_inside_an_event_loop_it_says_what_to_use_instead(example: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="get_sync would block the running event loop"):
        example.mesh.get_sync("count_primes", "any")
