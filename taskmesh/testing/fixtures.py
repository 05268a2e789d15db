"""The fixtures: a mesh on an empty database of a server that the session shares, and a worker in the background."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from taskmesh.model.distribution import check_extra

check_extra("cli", ("typer", "rich"), "the plugin for pytest")

# ruff: noqa: E402 — after the check: without the extra it is a bare ImportError
from taskmesh.cli.connected import load_mesh
from taskmesh.consumer.worker import Consumer
from taskmesh.mesh import TaskMesh
from taskmesh.store.blocking import drop_database
from taskmesh.testing.wire import Wire, can_lead_through

pytest_asyncio: Any
try:
    pytest_asyncio = importlib.import_module("pytest_asyncio")
except ImportError:  # an async plugin that need not be there
    pytest_asyncio = None

_LOOK_EVERY_S = 0.05
_GONE_AFTER_S = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the ini option."""
    parser.addini("taskmesh_app", "MODULE:MESH: the mesh that the fixture `mesh` is; without it, one without tasks.")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Where async tests run by anyio's plugin: on asyncio, as MongoDB's drivers need it."""
    return "asyncio"


@pytest.fixture(scope="session")
def taskmesh_uri() -> Iterator[str]:
    """The server that all tests share: an embedded MongoDB of this session, or what `TASKMESH_TEST_URI` names."""
    if uri := os.environ.get("TASKMESH_TEST_URI"):
        yield uri
        return
    from taskmesh.embedded import attach  # noqa: PLC0415 — an extra

    with (
        TemporaryDirectory(prefix="taskmesh-testing-", ignore_cleanup_errors=True) as directory,
        attach(Path(directory), cache_gb=0.25) as server,
    ):
        yield server.uri


@pytest.fixture(scope="session")
def taskmesh_wire(taskmesh_uri: str) -> Iterator[str]:
    """Where the mesh of a test connects to: a wire to that server, which can lose replies (`lose_reply`); by TLS none."""
    if not can_lead_through(taskmesh_uri):
        yield taskmesh_uri
        return
    with Wire(taskmesh_uri) as wire:
        yield wire.uri


@pytest.fixture
def taskmesh_database(taskmesh_uri: str) -> Iterator[str]:
    """The name of an empty database, which is dropped after the test."""
    name = f"test_{secrets.token_hex(6)}"
    yield name
    drop_database(taskmesh_uri, name)


@pytest.fixture
def _unconnected(request: pytest.FixtureRequest, taskmesh_wire: str, taskmesh_database: str) -> Iterator[TaskMesh]:
    target = request.config.getini("taskmesh_app")
    if not target:
        yield TaskMesh(taskmesh_wire, database=taskmesh_database)
        return
    with _importable(request.config.rootpath):
        mesh = load_mesh(target)
    client, database = mesh.connection.client, mesh.connection.database
    with _left_as_it_is(mesh):
        mesh.connect_to(taskmesh_wire, database=taskmesh_database)
        yield mesh
        mesh.connect_to(client, database=database)


@contextlib.contextmanager
def _left_as_it_is(mesh: TaskMesh) -> Iterator[None]:
    """Undo what the block defines and declares on a mesh: what a test says is its own."""
    codecs, schedules = mesh.connection.payloads.codecs, mesh.schedules.declarations
    declared: list[dict[str, Any]] = [mesh.definitions, mesh.data_changes, codecs, schedules]
    before = [dict(each) for each in declared]
    hooks, lifespan = mesh.hooks_of_consumers, mesh.worker_lifespan
    yield
    for each, was in zip(declared, before, strict=True):
        each.clear()
        each.update(was)
    mesh.hooks_of_consumers, mesh.worker_lifespan = hooks, lifespan


@contextlib.contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Find modules in the project's directory too, as `taskmesh worker` does."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    yield


async def _connected(mesh: TaskMesh) -> AsyncIterator[TaskMesh]:
    async with mesh:
        yield mesh


async def _at_work(mesh: TaskMesh) -> AsyncIterator[TestWorker]:
    worker = TestWorker(mesh)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=_GONE_AFTER_S)
    if running.done() and not running.cancelled():
        running.result()  # why it ended before the test did


@pytest.fixture
async def _mesh_of_anyio(_unconnected: TaskMesh) -> AsyncIterator[TaskMesh]:
    async for mesh in _connected(_unconnected):
        yield mesh


@pytest.fixture
async def _worker_of_anyio(mesh: TaskMesh) -> AsyncIterator[TestWorker]:
    async for worker in _at_work(mesh):
        yield worker


if pytest_asyncio is not None:

    async def _mesh_in_its_loop(_unconnected: TaskMesh) -> AsyncIterator[TaskMesh]:
        async for mesh in _connected(_unconnected):
            yield mesh

    async def _worker_in_its_loop(mesh: TaskMesh) -> AsyncIterator[TestWorker]:
        async for worker in _at_work(mesh):
            yield worker

    _mesh_of_asyncio = pytest_asyncio.fixture(_mesh_in_its_loop, name="_mesh_of_asyncio")
    _worker_of_asyncio = pytest_asyncio.fixture(_worker_in_its_loop, name="_worker_of_asyncio")


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> TaskMesh:
    """The mesh of `taskmesh_app`, or one without tasks, on an empty database."""
    found: TaskMesh = request.getfixturevalue(_variant(request, "_mesh") or "_unconnected")
    return found


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> TestWorker:
    """A worker of `mesh` in the background, which takes up what the test defines."""
    variant = _variant(request, "_worker")
    if variant is None:
        raise pytest.UsageError("the fixture `worker` is for async tests: in a plain one, call drain(mesh)")
    found: TestWorker = request.getfixturevalue(variant)
    return found


def _variant(request: pytest.FixtureRequest, name: str) -> str | None:
    """Which of the fixtures is made in the event loop of the test; None: it has none."""
    function = getattr(request, "function", None)
    if not inspect.iscoroutinefunction(function):
        return None
    if "anyio_backend" in request.fixturenames:
        return f"{name}_of_anyio"
    if pytest_asyncio is None:
        raise pytest.UsageError(
            f"{request.node.name} is async, and nothing runs async tests here: mark it with @pytest.mark.anyio, set "
            "anyio_mode = auto in pytest's configuration, or install pytest-asyncio"
        )
    return f"{name}_of_asyncio"


class TestWorker:
    """A worker for the tasks that are defined by now; a new one when there are more."""

    __test__ = False  # pytest: no tests are in it

    def __init__(self, mesh: TaskMesh) -> None:
        self._mesh = mesh
        self.consumer: Consumer | None = None
        """The one that runs, if there are tasks to run."""

    async def run(self) -> None:
        """Run for ever."""
        while True:
            while not self._mesh.definitions:  # noqa: ASYNC110 — nobody tells that a task was defined
                await asyncio.sleep(_LOOK_EVERY_S)
            known = set(self._mesh.definitions)
            self.consumer = self._mesh.consumer()
            running = asyncio.create_task(self.consumer.run())
            try:
                while set(self._mesh.definitions) == known and not running.done():  # noqa: ASYNC110 — the same
                    await asyncio.sleep(_LOOK_EVERY_S)
            finally:
                self.consumer.begin_stop(grace_ms=0)
                await running
