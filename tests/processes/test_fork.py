"""T42: a mesh that was used before a fork works in the child, or says at once what to do."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from pymongo import MongoClient

_BEGIN = """
import asyncio, os, sys, threading, traceback
from taskmesh import TaskMesh
from taskmesh.errors import TaskMeshError

uri, database = sys.argv[1:]
mesh = TaskMesh(uri, database=database)

@mesh.task
async def work(n: int = 0) -> None: ...

def in_child(call):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

_PUBLISH_SYNC = """
assert work.publish_sync("before").created
def publish():
    assert work.publish_sync("in-child").created
    assert not work.publish_sync("before").created
in_child(publish)
assert work.publish_sync("after").created
"""

_FROM_THREADS = """
made = []
threads = [threading.Thread(target=lambda i=i: made.append(work.publish_sync(f"t{i % 5}").created)) for i in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert sum(made) == 5 and len(made) == 20, made
def publish():
    thread = threading.Thread(target=lambda: made.append(work.publish_sync("in-child").created))
    thread.start()
    thread.join()
    assert made[-1]
in_child(publish)
"""

_CONNECTED_BEFORE = """
async def main():
    async with mesh:
        await work.publish("before")
        in_child(use_it)
        await work.publish("after")
def use_it():
    async def publish():
        await work.publish("in-child")
    try:
        asyncio.new_event_loop().run_until_complete(publish())
    except TaskMeshError as error:
        assert "fork" in str(error) and "connect it anew" in str(error), error
    else:
        raise AssertionError("it should say that it was connected before the fork")
# The child is in the middle of a coroutine of the parent's loop: it must not take itself for running in it.
def use_it_outside(original=use_it):
    asyncio._set_running_loop(None)
    original()
use_it = use_it_outside
asyncio.run(main())
"""

_CONNECTED_ANEW = """
async def publish(key):
    async with mesh:
        assert (await work.publish(key)).created
asyncio.run(publish("before"))
in_child(lambda: asyncio.run(publish("in-child")))
asyncio.run(publish("after"))
"""

_TWO_LOOPS = """
async def enter():
    await mesh.connect()
    await work.publish("before")
async def use():
    try:
        await work.publish("in-child")
    except TaskMeshError as error:
        assert "another event loop" in str(error), error
    else:
        raise AssertionError("it should say that it belongs to another loop")
    other = TaskMesh(uri, database=database)
    async with other:
        await other.publish("work", "in-child")
        await other.publish("work", "after")
asyncio.run(enter())
asyncio.run(use())
"""


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        pytest.param(_PUBLISH_SYNC, {"before", "in-child", "after"}, id="publish_sync"),
        pytest.param(_FROM_THREADS, {"in-child", *(f"t{i}" for i in range(5))}, id="publish_sync from threads"),
        pytest.param(_CONNECTED_BEFORE, {"before", "after"}, id="connected before the fork"),
        pytest.param(_CONNECTED_ANEW, {"before", "in-child", "after"}, id="connected anew"),
        pytest.param(_TWO_LOOPS, {"before", "in-child", "after"}, id="two event loops"),
    ],
)
def test_t42_a_mesh_after_a_fork_or_in_another_loop_works_or_says_what_to_do(
    mongo_uri: str, database: str, script: str, keys: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_BEGIN + script), mongo_uri, database],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with MongoClient[dict[str, object]](mongo_uri) as client:
        assert {task["key"] for task in client[database]["tasks"].find()} == keys
