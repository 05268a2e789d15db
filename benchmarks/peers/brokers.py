"""The peers' servers: Redis, PostgreSQL and MongoDB, started here on private loopback ports and stopped afterwards."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pymongo import MongoClient

from benchmarks.machine import server
from tests.mongod import free_port


class NotInstalled(Exception):
    """What a peer needs is not on this machine."""


class Brokers:
    """Servers, each started when it is first asked for."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._urls: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def url(self, kind: str) -> str:
        """Where such a server is. Raises `NotInstalled`."""
        if kind not in self._urls:
            self._urls[kind] = self._stack.enter_context(
                {"redis": _redis, "postgres": _postgres, "mongo": _mongo}[kind]()
            )
        return self._urls[kind]

    def clear(self, kind: str) -> None:
        """Empty it."""
        url = self.url(kind)
        if kind == "redis":
            _run(["redis-cli", "-p", str(_port_of(url)), "flushall"])
        elif kind == "postgres":
            _run(["psql", url, "-qc", "drop schema public cascade; create schema public"])
        else:
            with MongoClient[dict[str, object]](url) as client:
                client.drop_database("bench")

    def close(self) -> None:
        """Stop all of them."""
        self._stack.close()


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _program(name: str) -> str:
    found = shutil.which(name) or next((str(path) for path in Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if found is None:
        raise NotInstalled(f"{name} is not installed")
    return found


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise NotInstalled(f"{process.args!r} did not start")


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _redis() -> Iterator[str]:
    """In memory alone: no snapshots, no log, which is its fastest. A crash loses all of it."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as directory:
        process = subprocess.Popen(
            [_program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )
        try:
            _wait_for_port(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            _ended(process)


@contextmanager
def _postgres() -> Iterator[str]:
    """A cluster of its own with default durability. PostgreSQL refuses to run as root, so root lends it a user."""
    port = free_port()
    user = "postgres" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="bench-postgres-", ignore_cleanup_errors=True) as directory:
        data = Path(directory) / "data"
        if user:
            shutil.chown(directory, user)
        owner = user or getpass.getuser()
        initdb = [_program("initdb"), "-D", str(data), "-U", owner, "-A", "trust", "--no-sync"]
        subprocess.run(initdb, check=True, user=user, cwd=directory, capture_output=True)
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c max_connections=200 -c shared_buffers=256MB"
        process = subprocess.Popen(
            [_program("postgres"), "-D", str(data), "-k", directory, *options.split()],
            user=user,
            cwd=directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for_port(port, process)
            time.sleep(1.0)  # it listens a moment before it accepts
            yield f"postgresql://{owner}@127.0.0.1:{port}/postgres"
        finally:
            _ended(process)


@contextmanager
def _mongo() -> Iterator[str]:
    with server() as mongod:
        yield f"mongodb://{mongod.address}/bench?replicaSet=rs0"
