"""`taskmesh worker` in one process: what it says, which tasks it takes, how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.cli.shell import Shell, Started
from tests.waiting import wait_until


def test_it_says_in_five_lines_what_it_runs_from_where_and_how_to_stop_it(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--worker-id", "w1", "--concurrency", "5", "--queues", "a,b", "--names", "add,nap")
    lines = worker.out.splitlines()
    assert len(lines) == 5
    assert lines[0] == f"taskmesh worker w1 (pid {worker.pid})"
    assert lines[1].split() == ["runs", "add,", "nap", "(of", "app:mesh)"]
    assert lines[2].split()[:3] == ["from", "a,", "b"]
    assert taskmesh.database in lines[2]
    assert lines[3].split() == ["at", "once", "5"]
    assert "SIGTERM" in lines[4]


def test_until_idle_it_does_what_there_is_and_ends_with_0(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.done("worker", "app:mesh", "--until-idle")
    [entry] = taskmesh.done("show", "add", "k", "--json").json["task_state"]["worker_states"]
    assert entry["returns"] == 3


def test_names_and_queues_narrow_what_it_takes(taskmesh: Shell) -> None:
    for key, queue in (("mine", "q"), ("elsewhere", "other")):
        taskmesh.done("publish", "add", key, '{"a": 1, "b": 2}', "--queue", queue)
    taskmesh.done("publish", "nap", "another", '{"ms": 1}', "--queue", "q")
    taskmesh.done("worker", "app:mesh", "--queues", "q", "--names", "add", "--until-idle")
    statuses = {task["key"]: task["status"] for task in taskmesh.done("ls", "--json").json}
    assert statuses == {"mine": "SUCCESS", "elsewhere": "INIT", "another": "INIT"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_waits_for_what_runs_and_the_exit_status_is_0(taskmesh: Shell, number: int) -> None:
    worker = taskmesh.worker("--worker-id", "w1")
    taskmesh.done("publish", "until_open", "k")
    taskmesh.until_begun("k")
    worker.signal(number)
    worker.says("stops gracefully")
    taskmesh.open("k")
    assert worker.wait() == 0
    task = taskmesh.done("show", "until_open", "k", "--json").json
    assert task["status"] == "SUCCESS"
    assert [entry["worker_id"] for entry in task["task_state"]["worker_states"]] == ["w1"]
    assert "Traceback" not in worker.err


def test_the_second_signal_gives_back_what_runs_at_once(taskmesh: Shell) -> None:
    _gives_back_at_the_second_signal(taskmesh, taskmesh.worker("--worker-id", "w1"))


def _gives_back_at_the_second_signal(taskmesh: Shell, worker: Started) -> None:
    taskmesh.done("publish", "nap", "k", '{"ms": 600000}')
    taskmesh.until("RUNNING", "nap", "k")
    worker.signal(signal.SIGTERM)
    worker.says("stops gracefully")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    task = taskmesh.done("show", "nap", "k", "--json").json
    assert task["status"] == "INIT"
    assert task["task_state"]["worker_states"] == []


def test_after_the_grace_what_runs_is_given_back(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--grace-ms", "300")
    taskmesh.done("publish", "nap", "k", '{"ms": 600000}')
    taskmesh.until("RUNNING", "nap", "k")
    assert worker.stop() == 0
    assert taskmesh.status("nap", "k") == "INIT"


@pytest.mark.slow
def test_a_worker_whose_loop_is_stuck_still_exits_at_the_second_signal(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--worker-id", "w1")
    taskmesh.done("publish", "hang", "k", '{"ms": 600000}')
    worker.says("the event loop is blocked")
    worker.signal(signal.SIGTERM)
    worker.says("the event loop is blocked")  # it is not over: what runs has its grace
    assert worker.process.poll() is None
    worker.signal(signal.SIGINT)
    assert worker.wait() == 1, "what ran was not given back"
    assert "exiting without waiting for it" in worker.err


@pytest.mark.slow
def test_a_thread_that_will_not_end_does_not_keep_the_process(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--grace-ms", "100")
    taskmesh.done("publish", "block", "k", '{"ms": 600000}')
    taskmesh.until("RUNNING", "block", "k")
    assert worker.stop() == 0


@pytest.mark.parametrize("afterwards", ["", "loop.remove_signal_handler(signal.SIGUSR2)"], ids=["kept", "removed"])
def test_a_handler_that_hears_a_signal_of_its_own_leaves_the_worker_its_own(taskmesh: Shell, afterwards: str) -> None:
    """The event loop takes the descriptor by which the worker hears of signals, and gives it back to nobody."""
    app = (taskmesh.directory / "app.py").read_text()
    hears = f"""

import signal


@mesh.task
async def hears() -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, lambda: None)
    {afterwards}
"""
    (taskmesh.directory / "app.py").write_text(app + hears)
    worker = taskmesh.worker("--worker-id", "w1")
    taskmesh.done("publish", "hears", "k")
    taskmesh.until("SUCCESS", "hears", "k")
    _gives_back_at_the_second_signal(taskmesh, worker)


def test_a_signal_while_it_still_connects_ends_it_with_0(taskmesh: Shell) -> None:
    nowhere = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=60000"
    (taskmesh.directory / "app.py").write_text((taskmesh.directory / "app.py").read_text() + '\nprint("imported")\n')
    worker = taskmesh.start("worker", "app:mesh", "--uri", nowhere, PYTHONUNBUFFERED="1")
    worker.says("imported")
    # The handler is there as soon as the loop runs; the driver's own threads tell that it does.
    wait_until(
        lambda: len(psutil.Process(worker.pid).net_connections()) > 0 or psutil.Process(worker.pid).num_threads() > 1
    )
    assert worker.stop() == 0
    assert "Traceback" not in worker.err


def test_sigusr1_dumps_stacks_and_running_keys_and_it_goes_on(taskmesh: Shell) -> None:
    worker = taskmesh.worker("--worker-id", "w1", "--grace-ms", "100")
    for name, ms in (("nap", 600_000), ("block", 8_000)):
        taskmesh.done("publish", name, f"a-{name}-key", json.dumps({"ms": ms}))
        taskmesh.until_begun(f"a-{name}-key")
    worker.signal(signal.SIGUSR1)
    worker.says("--- end")
    assert "worker w1: running, 2 running" in worker.err
    for hint in ("a-nap-key", "a-block-key", "app.py", "in block", "line"):
        assert hint in worker.err
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    assert worker.stop() == 0


_NO_STACK = """

class NoStack(asyncio.Task):
    def print_stack(self, **_):
        raise TypeError("as Python's own does for a frame that has no line yet")


@mesh.lifespan
async def beside():
    waiting = NoStack(asyncio.sleep(600), name="without a stack")
    yield
    waiting.cancel()
"""


def test_a_stack_that_cannot_be_written_ends_no_worker(taskmesh: Shell) -> None:
    """An exception in the handler of a signal comes out of whatever code the signal has interrupted."""
    app = taskmesh.directory / "app.py"
    app.write_text(app.read_text() + _NO_STACK)
    worker = taskmesh.worker("--worker-id", "w1")
    worker.signal(signal.SIGUSR1)
    worker.says("--- end")
    assert "its stack cannot be written (TypeError)" in worker.err
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    taskmesh.until("SUCCESS", "add", "k")
    assert worker.stop() == 0


def test_it_takes_the_modules_own_place_unless_told_otherwise(taskmesh: Shell) -> None:
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    own = {"APP_URI": taskmesh.uri, "TASKMESH_URI": "", "TASKMESH_DATABASE": ""}
    taskmesh.done("worker", "app:mesh", "--until-idle", APP_DATABASE=f"{taskmesh.database}_x", **own)
    assert taskmesh.status("add", "k") == "INIT"
    taskmesh.done("worker", "app:mesh", "--until-idle", "--database", taskmesh.database, **own)
    assert taskmesh.status("add", "k") == "SUCCESS"


@pytest.mark.parametrize(
    ("target", "status", "told"),
    [
        ("app", 2, "MODULE:MESH"),
        (":mesh", 2, "MODULE:MESH"),
        ("../../x:y", 2, "'../../x' is a path, not the name of a module"),
        ("./app:mesh", 2, "is a path, not the name of a module"),
        (".app:mesh", 2, "is a path, not the name of a module"),
        ("app..x:mesh", 2, "is a path, not the name of a module"),
        ("nowhere:mesh", 1, "there is no module 'nowhere'"),
        ("app:other", 1, "has no 'other'; what it has: app:mesh"),
        ("app:add", 1, "is a TaskDefinition, not a TaskMesh"),
        ("empty:mesh", 1, "defines no tasks"),
        ("broken:mesh", 1, "ZeroDivisionError: division by zero"),
        ("lacking:mesh", 1, "No module named 'not_installed'"),
        ("leaving:mesh", 1, "SystemExit"),
    ],
)
def test_a_mesh_that_cannot_be_loaded(taskmesh: Shell, target: str, status: int, told: str) -> None:
    for name, text in {
        "empty": "from taskmesh import TaskMesh\nmesh = TaskMesh()\n",
        "broken": "def boom():\n    1 / 0\nboom()\n",
        "lacking": "import not_installed\n",
        "leaving": "import sys\nsys.exit(0)\n",
    }.items():
        (taskmesh.directory / f"{name}.py").write_text(text)
    ended = taskmesh("worker", target)
    assert ended.status == status
    assert told in ended.err
    assert "taskmesh/cli" not in ended.err, "only the user's own frames"
    assert ended.err.count("broken.py") == (2 if target == "broken:mesh" else 0)


def test_handlers_run_on_uvloop_where_it_is_installed(taskmesh: Shell) -> None:
    source = """
        import asyncio
        from taskmesh import TaskMesh
        mesh = TaskMesh()

        @mesh.task
        async def which() -> str:
            return type(asyncio.get_running_loop()).__module__
    """
    (taskmesh.directory / "loops.py").write_text(dedent(source))
    taskmesh.done("publish", "which", "k")
    taskmesh.done("worker", "loops:mesh", "--until-idle")
    assert taskmesh.done("result", "which", "k").json == "uvloop"


WRONG: list[list[str]] = [
    ["--processes", "0"],
    ["--concurrency", "0"],
    ["--worker-id", ""],
    ["--queues", ","],
    ["--names", "nobody"],
    ["--log-level", "loud"],
    ["--grace-ms", "-1"],
]


def test_wrong_usage_ends_with_2(taskmesh: Shell, subtests: pytest.Subtests) -> None:
    for words in WRONG:
        with subtests.test(words=words):
            ended = taskmesh("worker", "app:mesh", *words)
            assert ended.status == 2
            assert "Traceback" not in ended.err


def test_t7_two_workers_never_have_one_id(taskmesh: Shell) -> None:
    taskmesh.worker("--worker-id", "w1")
    second = taskmesh("worker", "app:mesh", "--worker-id", "w1")
    assert second.status == 1
    assert second.err.splitlines()[-1].startswith("taskmesh: worker id 'w1' is in use by process")


def test_a_module_is_found_in_the_current_directory(taskmesh: Shell, tmp_path: Path) -> None:
    package = tmp_path / "project" / "jobs"
    package.mkdir(parents=True)
    (package / "tasks.py").write_text((tmp_path / "app.py").read_text())
    installed = Path(sys.executable).with_name("taskmesh")
    where = ["--uri", taskmesh.uri, "--database", taskmesh.database]
    subprocess.run([installed, "worker", "jobs.tasks:mesh", "--until-idle", *where], cwd=package.parent, check=True)


def test_a_worker_has_the_hooks_of_its_mesh(taskmesh: Shell) -> None:
    app = (taskmesh.directory / "app.py").read_text()
    (taskmesh.directory / "app.py").write_text(
        app + "\nmesh.hooks(after=lambda task, ending: print(task.key, ending.kind))\n"
    )
    taskmesh.done("publish", "add", "k", '{"a": 1, "b": 2}')
    assert "k succeeded" in taskmesh.done("worker", "app:mesh", "--until-idle").out
