"""`taskmesh worker --processes N`: children that die, signals, and the end of it all."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.cli.shell import DEADLINE_S, Shell, Started
from tests.waiting import wait_until


def fleet(taskmesh: Shell, *words: str, processes: int = 2, **environment: str) -> Started:
    """Start a supervisor, and wait until all of its children work."""
    started = taskmesh.start(
        "worker", "app:mesh", "--processes", str(processes), "--worker-id", "w", *words, **environment
    )
    started.says(f"all {processes} workers are ready")
    return started


def pids(taskmesh: Shell) -> dict[str, int]:
    """Return the process of each live worker, as the registry has it."""
    return {info["worker_id"]: info["pid"] for info in taskmesh.done("workers", "--live", "--json").json}


def replaced(taskmesh: Shell, worker_id: str, before: int) -> None:
    """Wait until a worker is another process."""
    wait_until(lambda: pids(taskmesh).get(worker_id, before) != before, DEADLINE_S, what=f"{worker_id} is replaced")


@pytest.mark.slow
def test_children_have_derived_ids_and_the_supervisor_says_what_it_does(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    found = pids(taskmesh)
    assert found.keys() == {"w-1", "w-2"}
    assert set(found.values()) == {child.pid for child in supervisor.children}
    assert len(supervisor.out.splitlines()) == 5
    assert supervisor.out.splitlines()[0] == f"taskmesh supervisor (pid {supervisor.pid}): w-1 … w-2"
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_without_an_id_one_is_made_up(taskmesh: Shell) -> None:
    supervisor = taskmesh.start("worker", "app:mesh", "--processes", "2")
    supervisor.says("all 2 workers are ready")
    base = f"{socket.gethostname()}-{supervisor.pid}-"
    assert sorted(name.removeprefix(base).split("-")[1] for name in pids(taskmesh)) == ["1", "2"]


def test_a_child_that_is_killed_is_replaced_and_works(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    before = pids(taskmesh)["w-1"]
    os.kill(before, signal.SIGKILL)
    replaced(taskmesh, "w-1", before)
    assert "worker w-1 was ended by SIGKILL" in supervisor.err
    taskmesh.done("publish", "nap", "k", '{"ms": 1}', "--option", 'specific_worker_ids=["w-1"]')
    taskmesh.until("SUCCESS", "nap", "k")
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_task_that_kills_its_worker_again_and_again_does_not_end_the_supervisor(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    taskmesh.done("publish", "crash", "poison", "--app", "app:mesh", "--option", "max_timeouts=1")
    taskmesh.until("FAIL", "crash", "poison")
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    assert supervisor.err.count("ended with status 3") == 2
    assert supervisor.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_the_first_signal_stops_all_gracefully_with_0(taskmesh: Shell, tmp_path: Path, number: int) -> None:
    """On the way: systemd is told when all are ready and when they stop, and a password is in no list and no log."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        secret = f"{taskmesh.uri}&appName=s3cret"
        told = str(tmp_path / "notify")
        supervisor = fleet(taskmesh, "--log-level", "debug", TASKMESH_URI=secret, NOTIFY_SOCKET=told)
        assert manager.recv(1_000).startswith(b"READY=1\n")
        assert len(supervisor.children) == 2
        for process in (psutil.Process(supervisor.pid), *supervisor.children):
            assert "s3cret" not in " ".join(process.cmdline())
        for key in ("a", "b", "c"):
            taskmesh.done("publish", "until_open", key)
            taskmesh.until_begun(key)
        supervisor.signal(number)
        supervisor.says("stops gracefully", times=2)
        assert manager.recv(1_000) == b"STOPPING=1"
    taskmesh.open("a", "b", "c")
    assert supervisor.wait() == 0
    assert "s3cret" not in supervisor.out + supervisor.err
    for key in ("a", "b", "c"):
        assert taskmesh.status("until_open", key) == "SUCCESS"
    assert pids(taskmesh) == {}


@pytest.mark.slow
def test_the_second_signal_stops_all_at_once(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    taskmesh.done("publish", "nap", "k", '{"ms": 600000}')
    taskmesh.until("RUNNING", "nap", "k")
    supervisor.signal(signal.SIGTERM)
    supervisor.says("stops gracefully", times=2)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert taskmesh.status("nap", "k") == "INIT"


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_reaches_the_children_once(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    taskmesh.done("publish", "until_open", "k")
    taskmesh.until_begun("k")
    os.killpg(supervisor.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    supervisor.says("stops gracefully", times=2)
    taskmesh.open("k")
    assert supervisor.wait() == 0
    assert taskmesh.status("until_open", "k") == "SUCCESS"


def test_a_module_that_cannot_be_imported_ends_it_with_1_at_once(taskmesh: Shell) -> None:
    (taskmesh.directory / "app.py").write_text("import not_installed\n")
    ended = taskmesh("worker", "app:mesh", "--processes", "2")
    assert ended.status == 1
    assert ended.err.count("No module named 'not_installed'") <= 2, "no child was started a second time"
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_children_that_cannot_reach_the_database_are_tried_a_few_times(taskmesh: Shell) -> None:
    nowhere = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=100"
    ended = taskmesh("worker", "app:mesh", "--processes", "2", "--uri", nowhere)
    assert ended.status == 1
    assert "giving up" in ended.err
    assert 5 <= ended.err.count("no MongoDB answers") <= 10


def test_when_the_supervisor_is_killed_the_children_stop_gracefully(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    children = supervisor.children
    assert len(children) == 2
    taskmesh.done("publish", "until_open", "k")
    taskmesh.until_begun("k")
    supervisor.signal(signal.SIGKILL)
    wait_until(lambda: supervisor.err.count("stops gracefully") == 2, DEADLINE_S)
    taskmesh.open("k")
    gone, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert (len(gone), alive) == (2, [])
    assert taskmesh.status("until_open", "k") == "SUCCESS"
    assert "the supervisor has gone" in supervisor.err


def test_until_idle_it_ends_with_0_when_all_have(taskmesh: Shell) -> None:
    for number in range(4):
        taskmesh.done("publish", "nap", str(number), '{"ms": 300}')
    ended = taskmesh.done("worker", "app:mesh", "--processes", "2", "--concurrency", "1", "--until-idle")
    assert "all workers have ended" in ended.err
    assert {task["status"] for task in taskmesh.done("ls", "--json").json} == {"SUCCESS"}


def test_sighup_replaces_the_children_one_by_one(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    before = pids(taskmesh)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("all workers were replaced")
    after = pids(taskmesh)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    log = supervisor.err
    assert log.index("replacing worker w-1") < log.index("replacing worker w-2")
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_sighup_with_code_that_is_broken_keeps_the_others(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    before = pids(taskmesh)
    app = taskmesh.directory / "app.py"
    good = app.read_text()
    app.write_text("1 / 0\n")
    supervisor.signal(signal.SIGHUP)
    supervisor.says("the others stay as they are")
    assert pids(taskmesh) == {"w-2": before["w-2"]}
    app.write_text(good)
    replaced(taskmesh, "w-1", before["w-1"])
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_process_makes_way_after_so_many_tasks(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh, "--max-tasks-per-process", "3", processes=1)
    before = pids(taskmesh)["w-1"]
    for number in range(3):
        taskmesh.done("publish", "nap", str(number), '{"ms": 1}')
    replaced(taskmesh, "w-1", before)
    assert "is replaced by a new one" in supervisor.err
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_process_that_grows_too_large_is_replaced(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh, "--max-rss-mb", "300", processes=1)
    before = pids(taskmesh)["w-1"]
    taskmesh.done("publish", "grow", "k", '{"mb": 400}')
    replaced(taskmesh, "w-1", before)
    assert "more than 300: replacing it" in supervisor.err
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_sigusr1_reaches_the_children(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    supervisor.signal(signal.SIGUSR1)
    supervisor.says("--- end", times=2)
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_a_worker_that_is_stopped_from_afar_stays_stopped(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    taskmesh.done("stop-worker", "w-1", "--wait")
    wait_until(lambda: len(supervisor.children) == 1, DEADLINE_S)
    taskmesh.done("stop-worker", "w-2")
    assert supervisor.wait() == 0


@pytest.mark.slow
def test_a_child_that_somebody_else_terminates_is_replaced(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh)
    before = pids(taskmesh)["w-2"]
    os.kill(before, signal.SIGTERM)
    replaced(taskmesh, "w-2", before)
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_reload_restarts_on_a_change_also_after_a_mistake(taskmesh: Shell) -> None:
    supervisor = fleet(taskmesh, "--reload", processes=1)
    app = taskmesh.directory / "app.py"
    good = app.read_text()
    app.write_text("1 / 0\n")
    supervisor.says("waiting for a change of its files")
    app.write_text(good.replace("return a + b", "return a * b"))
    taskmesh.done("publish", "add", "k", '{"a": 5, "b": 5}')
    taskmesh.until("SUCCESS", "add", "k")
    [entry] = taskmesh.done("show", "add", "k", "--json").json["task_state"]["worker_states"]
    assert entry["returns"] == 25
    assert supervisor.stop() == 0
