"""`taskmesh worker` opens what `@mesh.lifespan` says once in each process, and closes it when its handlers have ended."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cli.shell import DEADLINE_S, Shell
from tests.waiting import wait_until

LIFESPAN = """

import contextlib
from pathlib import Path


def note(what: str) -> None:
    with open("notes", "a") as notes:
        notes.write(f"{os.getpid()} {what}\\n")


@mesh.lifespan
async def pools():
    note("opens")
    if os.path.exists("refuse"):
        raise ConnectionRefusedError("nobody listens")
    while os.path.exists("wait"):
        await asyncio.sleep(0.02)
    yield "pool of " + str(os.getpid())
    note("closes")


@mesh.task(option=patient)
async def look() -> str:
    begun()
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)
    note("handler ends")
    return current_task().state
"""


@pytest.fixture(autouse=True)
def app(taskmesh: Shell) -> None:
    with (taskmesh.directory / "app.py").open("a") as file:
        file.write(LIFESPAN)


def notes(directory: Path) -> dict[str, list[str]]:
    """Return what each process has noted."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    path = directory / "notes"
    for line in path.read_text().splitlines() if path.exists() else []:
        pid, _, what = line.partition(" ")
        found[pid].append(what)
    return dict(found)


def test_it_is_closed_after_what_runs_has_ended_at_a_graceful_stop(taskmesh: Shell) -> None:
    worker = taskmesh.worker()
    taskmesh.done("publish", "look", "k")
    taskmesh.until_begun("k")
    worker.signal(signal.SIGTERM)
    worker.says("stops gracefully")
    assert notes(taskmesh.directory) == {str(worker.pid): ["opens"]}
    (taskmesh.directory / "go").touch()
    assert worker.wait() == 0
    assert notes(taskmesh.directory) == {str(worker.pid): ["opens", "handler ends", "closes"]}
    [entry] = taskmesh.done("show", "look", "k", "--json").json["task_state"]["worker_states"]
    assert entry["returns"] == f"pool of {worker.pid}"


def test_each_process_of_a_supervisor_opens_its_own(taskmesh: Shell) -> None:
    supervisor = taskmesh.start("worker", "app:mesh", "--processes", "2")
    supervisor.says("all 2 workers are ready")
    children = {str(child.pid) for child in supervisor.children}
    assert supervisor.stop() == 0
    assert notes(taskmesh.directory) == {child: ["opens", "closes"] for child in children}


def test_a_worker_that_cannot_open_it_does_not_start(taskmesh: Shell) -> None:
    (taskmesh.directory / "refuse").touch()
    taskmesh.done("publish", "look", "k")
    ended = taskmesh("worker", "app:mesh")
    assert ended.status == 1
    assert "taskmesh: the lifespan 'pools' could not be opened, so the worker does not start" in ended.err
    assert "ConnectionRefusedError: nobody listens" in ended.err
    assert "app.py" in ended.err, "the traceback leads to the line"
    task = taskmesh.done("show", "look", "k", "--json").json
    assert (task["status"], task["task_state"]["worker_states"]) == ("INIT", [])
    assert taskmesh.done("workers", "--json").json == []


def test_a_signal_while_it_is_opened_ends_the_worker(taskmesh: Shell) -> None:
    (taskmesh.directory / "wait").touch()
    worker = taskmesh.start("worker", "app:mesh")
    wait_until(lambda: notes(taskmesh.directory), DEADLINE_S, what="it is being opened")
    assert worker.stop() == 0
    assert notes(taskmesh.directory) == {str(worker.pid): ["opens"]}
