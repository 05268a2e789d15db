"""Whatever a handler makes its child process say, the worker only reads it as data; and a child knows when its lease is over."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bson
import psutil
import pytest

from taskmesh import Status, TaskError, TaskMesh, TaskOption
from tests.consumer import process_handlers as handlers
from tests.waiting import eventually
from tests.working import finished, working

ONCE = TaskOption(max_unexpected_retries=0)


def define(mesh: TaskMesh, fn: Any, **settings: Any) -> Any:
    return mesh.task(run="process", name=fn.__name__, **settings)(fn)


@pytest.mark.parametrize(
    ("way", "end"),
    [
        ("error", Status.FAIL),
        ("retry", Status.SUCCESS),
        ("log", Status.SUCCESS),
        ("progress", Status.SUCCESS),
        ("publication", Status.SUCCESS),
        ("result", Status.SUCCESS),
    ],
)
async def test_what_a_handler_says_runs_no_code_in_its_worker(
    mesh: TaskMesh, tmp_path: Path, way: str, end: Status
) -> None:
    set_trap = define(mesh, handlers.set_trap, option=ONCE.changed(max_unexpected_retries=int(way == "retry")))
    add = define(mesh, handlers.add)
    trap = tmp_path / "trap"
    async with working(mesh):
        await set_trap.publish("k", way=way, path=str(trap))
        task = await finished(mesh, "set_trap", "k")
        assert not trap.exists()
        assert task.status is end, task.fail_reasons
        assert way != "error" or f"{handlers.__name__}.TrapError: snap" in task.fail_reasons[0]
        key = "trapped" if way == "publication" else (await add.publish("trapped", a=2)).key
        assert (await finished(mesh, "add", key)).status is Status.SUCCESS


def framed(message: bytes) -> bytes:
    return struct.pack("!i", len(message)) + message


@pytest.mark.parametrize(
    "said",
    [
        framed(b"no BSON"),
        framed(bson.encode({"said": []})),
        framed(bson.encode({"said": ["raised", {"module": 1}]})),
        framed(bson.encode({"said": ["a question", 1]})) + framed(b"\x80\x04."),
        struct.pack("!i", -7),
        struct.pack("!iQ", -1, 2**50),
    ],
    ids=["no BSON", "nothing", "half an error", "a question", "a negative length", "a petabyte"],
)
async def test_what_is_not_understood_fails_its_own_execution_alone(mesh: TaskMesh, said: bytes) -> None:
    say_bytes = define(mesh, handlers.say_bytes, option=ONCE)
    add = define(mesh, handlers.add)
    async with working(mesh) as consumer:
        handle = await say_bytes.publish("k", said=said)
        with pytest.raises(TaskError, match="ProcessDied: the handler's process was killed"):
            await handle.result(60)
        await eventually(lambda: not consumer.running)
        assert await (await add.publish("k", a=1)).result(60) == 2


async def test_an_error_keeps_its_class_and_its_plain_attributes(mesh: TaskMesh) -> None:
    raise_named = define(mesh, handlers.raise_named, option=ONCE)
    seen: list[Any] = []
    async with working(mesh, after=lambda _task, ending: seen.append(ending.error)):
        await raise_named.publish("k", kind="not portable")
        await finished(mesh, "raise_named", "k")
    assert isinstance(seen[0], handlers.NotPortable)
    assert (seen[0].code, str(seen[0])) == (7, "here says 7")


SCRIPT = """
import asyncio, os, subprocess, sys, time
from datetime import date
from pathlib import Path
from taskmesh import TaskMesh, current_task

mesh = TaskMesh(sys.argv[1] if len(sys.argv) > 1 else None, database=sys.argv[2] if len(sys.argv) > 1 else "x")

@mesh.task
async def later(day: date) -> None: ...

@mesh.task(run="process")
def publishes() -> None:
    definition = later.configure(queue="other", priority=7, delay_ms=3_600_000, specific_worker_ids=["w9"])
    current_task().publish(definition, "k", day=date(2026, 2, 3))

@mesh.task(run="process")
def beats(path: str) -> str:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(f"{os.getpid()} {program.pid}\\n")
    with open(path, "a", buffering=1) as file:
        while current_task().attempt == 1:
            print(time.time(), file=file)
            time.sleep(0.01)
    return "second time"

async def main() -> None:
    async with mesh:
        await mesh.consumer(worker_id="script").run()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def script(tmp_path: Path, mongo_uri: str, database: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process whose handlers are in its main module."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen([sys.executable, str(path), mongo_uri, database]) as worker, killed(worker):
        yield worker


@contextmanager
def killed(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        worker.kill()


@pytest.mark.usefixtures("script")
async def test_a_definition_is_published_from_a_process_with_all_its_settings(mesh: TaskMesh) -> None:
    await (await mesh.publish("publishes", "k")).result(60)
    task = await mesh.get("later", "k")
    assert (task.queue, task.params) == ("other", {"day": "2026-02-03"})
    assert (task.task_option.priority, task.task_option.specific_worker_ids) == (7, ("w9",))
    assert task.next_claim_time is not None
    assert (task.next_claim_time - mesh.clock.now()).total_seconds() > 3_000


@pytest.mark.lasting
async def test_a_child_ends_with_its_lease_though_its_parent_is_suspended(
    mesh: TaskMesh, script: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "beats"
    # So long that the child ends a second before its end: a busy machine may be late by most of that.
    handle = await mesh.publish("beats", "k", {"path": str(path)}, ping_interval_ms=500, worker_timeout_ms=10_000)
    await eventually(lambda: path.exists() and len(path.read_text().splitlines()) > 100)
    script.send_signal(signal.SIGSTOP)
    first, *_ = path.read_text().splitlines()
    pids = [int(pid) for pid in first.split()]
    await eventually(lambda: not any(lives(pid) for pid in pids), 40.0, what="the child and its program are gone")
    [entry] = (await handle.task()).task_state.worker_states
    assert entry.ping_expire_time is not None
    last = float(path.read_text().splitlines()[-1])
    assert last < entry.ping_expire_time.timestamp(), "and gone before others may have the task"
    script.send_signal(signal.SIGCONT)
    assert await handle.result(60) == "second time"
    task = await handle.task()
    assert ([entry.state for entry in task.task_state.worker_states], task.task_state.lost_cnt) == (["SUCCESS"], 1)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
