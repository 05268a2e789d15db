"""A flow on the command line, over REST and on its page."""

from __future__ import annotations

import asyncio

from taskmesh import TaskMesh
from tests.cli.shell import Shell
from tests.web.conftest import browser


async def published(mesh: TaskMesh) -> None:
    @mesh.task
    async def load() -> None: ...

    @mesh.task
    async def merge() -> None: ...

    async with mesh.flow("a/b") as flow:
        flow.add(merge, "<m>", after=[flow.add(load, str(n)) for n in range(20)])


async def test_a_flow_over_rest_and_on_its_page(mesh: TaskMesh) -> None:
    await published(mesh)
    async with browser(mesh) as client:
        told = (await client.get("/api/v1/flows/a%2Fb")).json()
        assert (told["counts"], told["progress"], len(told["edges"])) == ({"INIT": 21}, 0.0, 20)
        page = (await client.get("/flow?key=a/b")).text
        assert "20 tasks: 20 INIT" in page
        assert "&lt;m&gt;" in page
        assert page.count("<rect") == 2
        assert "/flow?key=a%2Fb" in (await client.get("/task?name=load&key=3")).text
        assert (await client.post("/api/v1/flows/a%2Fb/cancel")).json()["counts"] == {"CANCELLED": 21}
        assert (await client.get("/api/v1/flows/nobody")).status_code == 404


async def test_a_flow_on_the_command_line(mesh: TaskMesh, taskmesh: Shell) -> None:
    await published(mesh)
    told = await asyncio.to_thread(taskmesh.done, "flow", "a/b")
    assert "0% done: 21 INIT" in told.out
    refused = await asyncio.to_thread(taskmesh, "flow", "nobody")
    assert refused.status != 0
    assert "no flow 'nobody'" in refused.err
