"""`taskmesh demo`, on fewer files: as a process, on an embedded MongoDB of its own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pymongo import MongoClient

from tests.cli.shell import DEADLINE_S, Shell, shell_in
from tests.embedded.users import servers_in
from tests.waiting import wait_until

OWN_DATABASE = {"TASKMESH_DATABASE": ""}
FILES = 300


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` in an empty directory, with nothing but the embedded MongoDB; afterwards nothing may run there."""
    with shell_in(tmp_path, "", "") as shell:
        yield shell
    wait_until(lambda: not servers_in(tmp_path / ".taskmesh"), DEADLINE_S, what="the embedded MongoDB has gone")


@pytest.mark.lasting
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_demo_kills_a_worker_and_nothing_is_lost_or_doubled_also_a_second_time(alone: Shell, times: int) -> None:
    temporary = alone.directory / "temporary"
    temporary.mkdir()
    for _ in range(times):
        ended = alone.done("demo", "--files", str(FILES), TMPDIR=str(temporary))
        out = ended.out
        assert f"published {FILES} tasks, {FILES} of them new" in out
        [killed] = re.findall(r"SIGKILL to (worker-\d), which holds [1-4]: ", out)
        assert re.search(rf"\.py: {killed} → worker-\d", out), "its tasks are seen moving to others"
        assert f"0 of {FILES} were new, and an idle worker found nothing to do" in out
        assert re.search(rf"^files +{FILES}$", out, re.MULTILINE)
        assert re.search(rf"^{killed} .* killed", out, re.MULTILINE)
        assert f"every one of {FILES} results equals the direct computation" in out
        assert list(temporary.iterdir()) == [], "no files are left"


@pytest.mark.slow
def test_its_database_is_dropped_unless_it_is_to_be_kept(taskmesh: Shell) -> None:
    with MongoClient[dict[str, object]](taskmesh.uri) as client:
        before = set(client.list_database_names())
        taskmesh.done("demo", "--files", str(FILES), **OWN_DATABASE)
        assert {name for name in client.list_database_names() if name.startswith("demo_")} <= before
        kept = taskmesh.done("demo", "--files", str(FILES), "--keep", **OWN_DATABASE).out
        [database] = re.findall(r"--database (demo_\w+)", kept)
        assert client[database].tasks.count_documents({"status": "SUCCESS"}) == FILES
        client.drop_database(database)


@pytest.mark.slow
def test_in_a_database_that_is_named_it_leaves_everything_else_as_it_is(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k")
    with MongoClient[dict[str, object]](taskmesh.uri) as client:
        before = set(client[taskmesh.database].list_collection_names())
        out = taskmesh.done("demo", "--files", str(FILES), "--database", taskmesh.database).out
        assert f"database {taskmesh.database!r}, collection 'demo_" in out
        assert set(client[taskmesh.database].list_collection_names()) == before
        assert taskmesh.status("add", "k") == "INIT"
        kept = taskmesh.done("demo", "--files", str(FILES), "--keep").out
        [collection] = re.findall(rf"--database {taskmesh.database} --collection (demo_\w+)", kept)
        assert client[taskmesh.database][collection].count_documents({"status": "SUCCESS"}) == FILES


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_database(taskmesh: Shell) -> None:
    demo = taskmesh.start("demo", **OWN_DATABASE)
    demo.says("worker-1: ")
    workers = demo.children
    assert len(workers) >= 3
    demo.signal(signal.SIGINT)
    assert demo.wait() == 130
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []
    [database] = re.findall(r"database '(demo_\w+)'", demo.out)
    with MongoClient[dict[str, object]](taskmesh.uri) as client:
        assert database not in client.list_database_names()


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_workers(taskmesh: Shell) -> None:
    demo = taskmesh.start("demo", **OWN_DATABASE)
    demo.says("worker-1: ")
    workers = demo.children
    demo.signal(signal.SIGKILL)
    assert psutil.wait_procs(workers, timeout=DEADLINE_S)[1] == []
    [database] = re.findall(r"database '(demo_\w+)'", demo.out)
    with MongoClient[dict[str, object]](taskmesh.uri) as client:
        client.drop_database(database)


def test_too_few_files_are_wrong_usage(taskmesh: Shell) -> None:
    assert taskmesh("demo", "--files", "3").status == 2
