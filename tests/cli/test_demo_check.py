"""The check at the end of the demo finds what it is there to find."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pymongo import AsyncMongoClient

from taskmesh import TaskMesh
from taskmesh.cli.demo import Report, check
from taskmesh.cli.demo_tasks import DIARIES, count, source_files, tokenize_file
from taskmesh.cli.demo_tasks import mesh as definitions

PATHS = source_files(6)


@pytest.fixture
async def done(
    mongo_uri: str, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TaskMesh]:
    """A mesh whose six tasks are done."""
    monkeypatch.setenv(DIARIES, str(tmp_path))
    definitions.connect_to(mongo_uri, database=database)
    async with definitions as mesh:
        await tokenize_file.publish_many({path: {"path": path} for path in PATHS})
        await mesh.consumer(worker_id="w1").run(until_idle=True)
        yield mesh


async def checked(mesh: TaskMesh, diaries: Path) -> Report:
    report = Report()
    await check(mesh, PATHS, diaries, report)
    return report


@pytest.fixture
def tasks(mongo_uri: str) -> AsyncMongoClient[dict[str, object]]:
    """A client, to break what is stored."""
    return AsyncMongoClient(mongo_uri)


def test_the_library_is_found_without_what_was_installed_beside_it() -> None:
    paths = source_files()
    assert len(paths) > 500
    assert "json/__init__.py" in paths
    assert not [path for path in paths if "site-packages" in path]
    assert max(len(path.encode()) for path in paths) <= 512


def test_a_file_is_counted_as_it_is() -> None:
    counted = count("this.py")
    assert counted["lines"] > 10
    assert counted["tokens"] > 50
    assert len(counted["sha256"]) == 64


async def test_nothing_is_wrong_and_nothing_moved_when_no_worker_was_killed(done: TaskMesh, tmp_path: Path) -> None:
    report = await checked(done, tmp_path)
    assert (report.problems, report.moved) == ([], {})
    assert (report.executed_by.total(), report.recorded_by) == (6, {"w1": 6})


async def test_every_flaw_is_found(
    done: TaskMesh, tmp_path: Path, tasks: AsyncMongoClient[dict[str, object]], database: str
) -> None:
    await done.delete("tokenize", PATHS[1])
    await done.retry("tokenize", PATHS[2])
    (tmp_path / "w2").write_text(f"{PATHS[3]}\n")
    wrong = {"$set": {"task_state.worker_states.0.returns.tokens": -1}}
    await tasks[database].tasks.update_one({"key": PATHS[4]}, wrong)
    await tasks.close()
    *flaws, result = sorted((await checked(done, tmp_path)).problems, key=lambda told: "the result is" in told)
    assert set(flaws) == {
        f"{PATHS[1]}: lost, there is no such task any more",
        f"{PATHS[2]}: INIT, with 0 successes: one is right",
        f"{PATHS[3]}: executed 2 times, with 0 executions lost",
    }
    assert result.startswith(f"{PATHS[4]}: the result is")
