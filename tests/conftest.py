"""What every test may ask for: real servers, a database of its own, asyncio, and a guard for the event loop."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from blockbuster import BlockBuster
from pymongo import MongoClient

from taskmesh import TaskMesh
from tests.cli.shell import Shell, shell_in
from tests.databases import Databases
from tests.mongod import Mongod
from tests.mongods import ThreeNodes, quick_directory, small_mongod, three_nodes
from tests.processes.fleet import Fleet
from tests.turns import booting, turn

_MONGOD = pytest.StashKey[Mongod]()
_GC_THRESHOLD = 50_000

# A machine that is busy takes longer for an example; that is no failure.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what is about time, while nothing else runs, and then with what lasts longest."""
    items.sort(key=lambda item: (not item.get_closest_marker("timed"), not item.get_closest_marker("lasting")))


def pytest_collection_finish() -> None:
    """Keep what was imported and collected: looking through it for garbage was a third of the tests' processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep tests that are about time and all others apart."""
    with turn(timed=item.get_closest_marker("timed") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Start the server of the whole session before the first test, which may be one about time."""
    with ExitStack() as stack:
        wanted = any("mongod" in item.fixturenames for item in session.items if isinstance(item, pytest.Function))
        if wanted and not session.config.option.collectonly:
            directory = stack.enter_context(quick_directory())
            with booting():
                server = stack.enter_context(small_mongod(directory))
                session.config.stash[_MONGOD] = server.initiate()
        return (yield)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio alone: both drivers need it."""
    return "asyncio"


@pytest.fixture(scope="session")
def mongod(request: pytest.FixtureRequest) -> Mongod:
    """The one-node replica set of the whole session, with failpoints and a TTL monitor that runs each second.

    It is shared: a test that would stop, freeze or fill it starts its own with `own_mongod`.
    """
    return request.config.stash[_MONGOD]


@pytest.fixture(scope="session")
def mongo_uri(mongod: Mongod) -> str:
    """The URI of the session's replica set."""
    return mongod.uri


@pytest.fixture(scope="session")
def _databases(mongo_uri: str) -> Iterator[Databases]:
    with MongoClient[dict[str, object]](mongo_uri) as client:
        yield Databases(client)


@pytest.fixture
def never_used() -> None:
    """For a test that asks the server what is there: a new database, of which nothing is left from another test.

    An index never forgets that there was an array in it, and then sorts; the stream of a killed worker stays for minutes.
    """


@pytest.fixture
def database(request: pytest.FixtureRequest, _databases: Databases) -> Iterator[str]:
    """The name of a database that no other test uses at that time, and in which there is no document.

    For tests with a `mesh`, a `taskmesh` or a `life`, which would make them, it may have taskmesh's collections and indexes.
    """
    if {"mesh", "taskmesh", "life"} & set(request.fixturenames) and "never_used" not in request.fixturenames:
        name = _databases.prepared()
        yield name
        _databases.rest(name)
    else:
        name = _databases.new()
        yield name
        _databases.drop(name)


@pytest.fixture
async def mesh(mongo_uri: str, database: str) -> AsyncIterator[TaskMesh]:
    """A connected mesh on a database of its own. Define its tasks in the test; run consumers by `tests/working.py`."""
    async with TaskMesh(mongo_uri, database=database) as mesh:
        yield mesh


@pytest.fixture
def fleet(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Fleet]:
    """Worker processes on the test's database; those that are left are killed."""
    with Fleet(mongo_uri, database, tmp_path / "fleet") as workers:
        yield workers


@pytest.fixture
def taskmesh(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` on the session's MongoDB, in a directory with a module `app`."""
    with shell_in(tmp_path, mongo_uri, database) as shell:
        yield shell


@pytest.fixture
def own_mongod() -> Iterator[Mongod]:
    """A one-node replica set of this test alone, which it may kill, suspend and start again."""
    with quick_directory() as directory, small_mongod(directory / "own") as server:
        yield server.initiate()


@pytest.fixture
def standalone_mongod() -> Iterator[Mongod]:
    """A server without a replica set."""
    with quick_directory() as directory, small_mongod(directory / "standalone", replica_set=None) as server:
        yield server


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ThreeNodes]:
    """Three servers that elect a new primary within about two seconds. Mark the test `failover`.

    Shared by one module: a test that stops a member starts it again.
    """
    with quick_directory() as directory, three_nodes(directory) as nodes:
        yield nodes


@cache
def _guard() -> BlockBuster:
    """Make the guard once: finding all that can block takes 20 ms of computing, and most tests take little more."""
    guard = BlockBuster("taskmesh")
    for call in guard.functions.values():
        # Once in a client's life PyMongo looks whether it runs in a container: a stat of one local file.
        call.can_block_in("pymongo/pool_options.py", "get_container_env_info")
        # Once in a process's life for each time zone: a small local file, kept from then on. So the import of cronsim.
        call.can_block_in("taskmesh/model/recurrence.py", {"_zone", "_cronsim"})
    return guard


@pytest.fixture(autouse=True)
def _the_event_loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which code of taskmesh makes a blocking call while an event loop runs in its thread."""
    if request.node.get_closest_marker("blocks_the_loop"):
        yield
        return
    guard = _guard()
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()
