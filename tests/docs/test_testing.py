"""The code of docs/testing.md works, as its readers' own project."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.examples import examples_in

FILES = {example.about: example.text for example in examples_in("docs/testing.md")}


OF_ONE_TEST = {
    "conftest.py": FILES["conftest.py"],
    "pytest.ini": FILES["pytest.ini"],
    "shop.py": """
from taskmesh import TaskMesh

mesh = TaskMesh(database="shop")
seen = []


@mesh.task
async def report() -> None: ...


mesh.every(report, interval_ms=60_000)
""",
    "test_shop.py": """
import pytest
from shop import report, seen
from taskmesh import AESCodec
from taskmesh.testing import drain

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("time", [1, 2])
async def test_what_a_test_declares_is_its_own(mesh, time):
    assert [schedule.schedule_id for schedule in await mesh.schedules.all()] == ["report"]
    await mesh.schedules.remove("report")
    await report.publish("k")
    await drain(mesh)
    assert seen == []

    @mesh.task(codec=AESCodec({"k": bytes(32)}, current="k"))
    async def secret() -> None: ...

    @mesh.on_change("orders")
    async def changed(event) -> None: ...

    @mesh.lifespan
    async def opened():
        yield

    await mesh.every(secret, interval_ms=60_000)
    mesh.hooks(before=seen.append)
    await report.publish("k2")
    await drain(mesh)
    assert [task.key for task in seen] == ["k2"]
    seen.clear()


async def test_nothing_of_that_is_left(mesh):
    assert list(mesh.definitions) == ["report"]
    assert not mesh.data_changes
    assert mesh.connection.payloads.codec_of("secret") is None
""",
}
"""A project whose tests declare more than tasks."""


def output_of(directory: Path, files: Mapping[str, str], status: int = 0, **more: str) -> str:
    """Run the tests of such a project, and return what pytest says. `status`: how it has to end."""
    for name, text in files.items():
        (directory / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TASKMESH_", "PYTEST_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(directory), "-p", "no:cacheprovider", "test_shop.py"],
        cwd=directory,
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_tests_of_handlers_pass_on_the_mongodb_that_comes_along(tmp_path: Path) -> None:
    assert "7 passed" in output_of(tmp_path, FILES)
    assert not (tmp_path / ".taskmesh").exists(), "nothing is left beside the tests"


def test_what_a_test_declares_is_gone_after_it(tmp_path: Path, mongo_uri: str) -> None:
    assert "3 passed" in output_of(tmp_path, OF_ONE_TEST, TASKMESH_TEST_URI=mongo_uri)


def test_a_worker_that_cannot_work_says_why(tmp_path: Path, mongo_uri: str) -> None:
    test = """
import pytest

pytestmark = pytest.mark.anyio


async def test_of_what_cannot_be_watched(mesh, worker):
    @mesh.on_change("orders", [{"$match": {"$bogus": 1}}])
    async def changed(event) -> None: ...

    handle = await mesh.publish("changed", "k", {"event": {}})
    with pytest.raises(TimeoutError):
        await handle.result(timeout=2)
"""
    files = {"conftest.py": FILES["conftest.py"], "pytest.ini": "[pytest]\n", "test_shop.py": test}
    told = output_of(tmp_path, files, status=1, TASKMESH_TEST_URI=mongo_uri)
    assert "1 passed, 1 error" in told
    assert "InvalidOption: task 'changed': the server opens no stream of changes" in told


def test_an_async_test_that_nothing_runs_says_what_it_lacks(tmp_path: Path, mongo_uri: str) -> None:
    test = "async def test_without_a_mark(mesh): ...\n"
    files = {"conftest.py": FILES["conftest.py"], "pytest.ini": "[pytest]\n", "test_shop.py": test}
    told = output_of(tmp_path, files, status=1, TASKMESH_TEST_URI=mongo_uri)
    assert "mark it with @pytest.mark.anyio, set anyio_mode = auto" in told
