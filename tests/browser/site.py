"""The dashboard as its users have it: `taskmesh web` with real workers behind it, and a Chromium in front."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.async_api import BrowserContext, ConsoleMessage, Page, Request

from taskmesh import TaskMesh
from tests.browser.shop import DOORS, define
from tests.cli.shell import Shell, Started
from tests.mongod import free_port
from tests.web.serving import serve

ROOT = Path(__file__).parents[2]


@dataclass
class Site:
    """A photo shop's fleet on a database of its own."""

    shell: Shell
    doors: Path
    workers: dict[str, Started] = field(default_factory=dict)
    url: str = ""

    def __post_init__(self) -> None:
        self.doors.mkdir()
        self.shell.environment |= {"PYTHONPATH": str(ROOT), DOORS: str(self.doors)}

    def mesh(self) -> TaskMesh:
        """Return a mesh on the same database, to publish and to look; not connected yet."""
        return define(TaskMesh(self.shell.uri, database=self.shell.database))

    def open(self, *doors: str) -> None:
        """Let the tasks go on that wait here."""
        for name in doors:
            (self.doors / name).touch()

    def hire(self, worker_id: str, *words: str) -> Started:
        """Start a worker; `staffed` tells when it claims."""
        started = self.shell.start("worker", "tests.browser.shop:mesh", "--worker-id", worker_id, *words)
        self.workers[worker_id] = started
        return started

    def staffed(self, *worker_ids: str) -> None:
        """Wait until these workers claim."""
        for worker_id in worker_ids:
            self.workers[worker_id].says("at once\n", times=2)

    def serve(self, *words: str, **environment: str) -> str:
        """Start the dashboard, wait until it answers, and return its address."""
        return serve(self.shell, *words, **environment)[1]


class Gate:
    """A way to the dashboard that can be shut: what is open is cut, and nothing is let in."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._links: set[asyncio.StreamWriter] = set()
        self.port = free_port()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Let everybody in."""
        self._server = await asyncio.start_server(self._let_in, "127.0.0.1", self.port)

    def shut(self) -> None:
        """Cut all connections, and refuse new ones."""
        if self._server is not None:
            self._server.close()
        for link in self._links:
            link.transport.abort()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_reader, on_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._links |= {writer, on_writer}
        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass_on(reader, on_writer))
                both.create_task(_pass_on(on_reader, writer))
        self._links -= {writer, on_writer}


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def gate_to(url: str) -> AsyncIterator[Gate]:
    """Yield an open gate to the dashboard; it is shut at the end."""
    gate = Gate(int(url.rpartition(":")[2]))
    await gate.open()
    try:
        yield gate
    finally:
        gate.shut()


class Watched:
    """A page, and whatever went wrong in it that its user does not see: scripts, the policy, loads from elsewhere."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"script: {error}"))
        page.on("console", self._heard)
        page.on("request", self._asked)

    def _heard(self, message: ConsoleMessage) -> None:
        # That an answer was an error (404, 422, the server is away) is what the page shows; the rest is a fault.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.wrong.append(f"console: {message.text}")

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:")):
            self.wrong.append(f"from elsewhere: {request.url}")


async def opened(context: BrowserContext, url: str) -> Watched:
    """Return a new page, watched."""
    return Watched(await context.new_page(), url)
