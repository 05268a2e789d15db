"""One server for all processes of a directory, from the first to the last, whatever becomes of them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pymongo import MongoClient, WriteConcern

from taskmesh.embedded import attach
from taskmesh.embedded.watchdog import GATE, STATE, open_lock, release, try_lock
from tests.embedded.users import mongods_in, servers_in, users, watchdog_in
from tests.mongod import Mongod
from tests.mongods import small_mongod
from tests.waiting import wait_until


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for an embedded server, of which nothing may run when the test is over."""
    directory = tmp_path / ".taskmesh"
    yield directory
    wait_until(lambda: not servers_in(directory), what="mongod and watchdog have gone")


def write(uri: str, key: object) -> None:
    with MongoClient[dict[str, object]](uri) as client:
        client.app.get_collection("things", write_concern=WriteConcern("majority")).insert_one({"_id": key})


def keys(uri: str) -> list[object]:
    with MongoClient[dict[str, object]](uri) as client:
        return [thing["_id"] for thing in client.app.things.find().sort("_id")]


def is_taken(path: Path) -> bool:
    """Whether somebody holds a lock."""
    probe = open_lock(path)
    try:
        return not try_lock(probe)
    finally:
        release(probe)


def test_processes_that_attach_at_the_same_instant_share_one_server(place: Path) -> None:
    with users(place, 8) as crowd:
        assert len({user.mongod for user in crowd}) == 1
        assert mongods_in(place) == [crowd[0].mongod]
        write(str(crowd[0].attached["uri"]), 1)
        assert keys(str(crowd[7].attached["uri"])) == [1]


def test_threads_that_attach_at_the_same_instant_share_one_server(place: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        held = [future.result() for future in [pool.submit(attach, place) for _ in range(8)]]
    assert len({server.pid for server in held}) == 1
    for server in held:
        assert psutil.pid_exists(server.pid)
        server.close()
        server.close()


def test_it_may_open_what_the_system_allows_and_not_what_a_shell_begins_with(place: Path) -> None:
    """200 collections are 400 files; with 1024 of them, as most shells have, the tests of this project ended theirs."""
    begun_with = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, begun_with[1]))
    try:
        server = attach(place)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, begun_with)
    try:
        with MongoClient[dict[str, object]](server.uri) as client:
            for number in range(200):
                client.app.create_collection(f"things{number}")
            assert client.admin.command("ping")["ok"]
    finally:
        server.close()


def test_the_last_one_that_leaves_takes_the_server_down(place: Path) -> None:
    with users(place, 2) as (first, second):
        assert first.mongod == second.mongod
        first.leave()
        write(str(second.attached["uri"]), 1)
        assert mongods_in(place) == [second.mongod]
        second.leave()
        wait_until(lambda: not servers_in(place))


def test_kill_9_of_the_only_user_leaves_no_orphan(place: Path) -> None:
    with users(place, 1) as [user]:
        server = user.mongod
        assert mongods_in(place) == [server]
        user.kill()
        wait_until(lambda: not servers_in(place))


def test_the_server_survives_the_process_that_started_it(place: Path) -> None:
    with users(place, 1) as [starter]:
        assert starter.mongod
        with users(place, 1) as [other]:
            assert other.mongod == starter.mongod
            for child in psutil.Process(starter.process.pid).children(recursive=True):
                child.kill()
            os.killpg(starter.process.pid, signal.SIGINT)  # what Ctrl-C sends
            starter.kill()  # a shell that started us in the background may have made us deaf to SIGINT
            write(str(other.attached["uri"]), 1)
            assert mongods_in(place) == [other.mongod]


@pytest.mark.slow
def test_a_forked_child_keeps_the_server_that_its_parent_attached_to(place: Path) -> None:
    script = """
import json, os, sys
from pathlib import Path
from taskmesh.embedded import attach
server = attach(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(json.dumps({"uri": server.uri, "pid": server.pid, "child": child}), flush=True)
server.close()
os.kill(os.getpid(), 9)
"""
    with users(place, 1, script) as [user]:
        assert psutil.pid_exists(int(str(user.attached["child"])))
        user.process.wait(30)
        write(str(user.attached["uri"]), 1)
        assert user.mongod in mongods_in(place)
        assert user.process.stdin is not None
        user.process.stdin.close()


@pytest.mark.slow
def test_data_of_an_earlier_run_is_there_again_on_the_same_port(place: Path) -> None:
    with attach(place) as server:
        write(server.uri, 1)
    wait_until(lambda: not servers_in(place))
    with attach(place) as again:
        assert keys(again.uri) == [1]
        assert again.port == server.port


def test_data_of_an_earlier_run_is_there_again_when_its_port_is_taken(place: Path) -> None:
    with attach(place) as server:
        write(server.uri, 1)
    wait_until(lambda: not servers_in(place))
    elsewhere = Mongod(place.parent / "elsewhere", port=server.port, replica_set=None)
    with elsewhere, attach(place) as again:
        assert again.port != server.port
        assert keys(again.uri) == [1]
        write(again.uri, 2)


@pytest.mark.slow
def test_who_attaches_while_the_last_one_leaves_gets_a_server(place: Path) -> None:
    def come_and_go(name: int) -> None:
        for number in range(3):
            with attach(place) as server:
                write(server.uri, f"{name}-{number}")

    with ThreadPoolExecutor(3) as pool:
        for visit in [pool.submit(come_and_go, name) for name in range(3)]:
            visit.result()
    with attach(place) as server:
        assert len(keys(server.uri)) == 9


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("{", marks=pytest.mark.slow),
        '{"pid": 1, "port": 1, "watchdog": 1}',
    ],
)
def test_files_that_a_killed_watchdog_left_are_cleaned_up(place: Path, state: str) -> None:
    with attach(place):
        pass
    wait_until(lambda: not servers_in(place))
    (place / STATE).write_text(state)
    with attach(place) as server:
        write(server.uri, 1)


def test_a_killed_mongod_is_replaced_at_the_next_attach_with_all_its_data(place: Path) -> None:
    with attach(place) as server:
        write(server.uri, 1)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not servers_in(place))
        with attach(place) as again:
            assert keys(again.uri) == [1]


def test_whoever_meets_a_watchdog_that_is_going_gets_a_server_all_the_same(place: Path) -> None:
    """Its mongod has died, and it has yet to notice."""
    with attach(place) as server, ThreadPoolExecutor() as pool:
        write(server.uri, 1)
        going = watchdog_in(place)
        os.kill(going, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGKILL)
        attaching = pool.submit(attach, place)
        wait_until(lambda: is_taken(place / GATE))
        os.kill(going, signal.SIGCONT)
        with attaching.result() as again:
            assert keys(again.uri) == [1]


@pytest.mark.slow
def test_a_killed_watchdog_takes_its_mongod_along(place: Path) -> None:
    with attach(place) as server:
        write(server.uri, 1)
        os.kill(watchdog_in(place), signal.SIGKILL)
        wait_until(lambda: not servers_in(place))
        with attach(place) as again:
            assert keys(again.uri) == [1]


def test_a_suspended_mongod_does_not_outlive_its_last_user(place: Path) -> None:
    with attach(place) as server:
        os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: not servers_in(place))


def test_a_mongod_without_a_watchdog_is_ended_and_replaced(place: Path) -> None:
    with small_mongod(place / "data") as leftover:
        leftover.initiate()
        write(leftover.uri, 1)
        with attach(place) as server:
            assert not leftover.running
            assert keys(server.uri) == [1]


def test_the_directory_is_kept_out_of_git_and_from_other_users(place: Path) -> None:
    with attach(place):
        assert place.stat().st_mode & 0o077 == 0
        assert (place / ".gitignore").read_text() == "*\n"


def test_a_program_that_a_user_starts_does_not_hold_the_server(place: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as before, attach(place):
        during = subprocess.Popen(command, stdin=subprocess.PIPE)
    with during:
        wait_until(lambda: not servers_in(place))
        assert before.poll() == 0
        assert during.poll() is None
