"""Handlers in child processes: whatever happens in one hurts its own execution, and it can be ended at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import psutil
import pytest

from taskmesh import InvalidParams, Status, TaskError, TaskMesh, TaskOption
from taskmesh.consumer.subprocess import processes
from taskmesh.consumer.subprocess.processes import MAX_IDLE, Child, Processes
from tests.consumer import process_handlers as handlers
from tests.waiting import eventually
from tests.working import finished, parts_of, working

ONCE = TaskOption(max_unexpected_retries=0)
AT_ONCE = TaskOption(unexpected_retry_delay_ms=0)


@pytest.fixture(scope="module")
def _kept() -> Iterator[list[Child]]:
    """Children that nobody uses at the moment."""
    kept: list[Child] = []
    yield kept
    for child in kept:
        child.hang_up()
    for child in kept:
        child.dismiss()


@pytest.fixture(scope="module", autouse=True)
def _in_the_foreground() -> Iterator[None]:
    """Where SIGINT is ignored, as in all that a shell has started in the background, what this process starts ignores it, too.

    For the whole module, since a test may get a child that an earlier one has started.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_children() -> None:
    """For a test about the beginning or end of children: it gets none of other tests, and its own end with its consumer."""


@pytest.fixture(autouse=True)
def _children_go_on_to_the_next_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _kept: list[Child]
) -> None:
    """A new one takes half a second to start."""
    if "own_children" in request.fixturenames:
        return

    async def keep(pool: Processes) -> None:
        pool._closed.set()
        _kept.extend(pool._idle)
        pool._idle = []

    monkeypatch.setattr(processes, "Child", lambda: _kept.pop() if _kept else Child())
    monkeypatch.setattr(Processes, "close", keep)


def define(mesh: TaskMesh, fn: Any, **settings: Any) -> Any:
    return mesh.task(run="process", name=fn.__name__, **settings)(fn)


def gone(*pids: int) -> bool:
    return not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def pids_in(path: Path) -> list[int]:
    text = await eventually(lambda: path.exists() and path.read_text())
    return [int(pid) for pid in str(text).split()]


async def test_the_value_comes_back_and_defaults_hold(mesh: TaskMesh) -> None:
    add = define(mesh, handlers.add)
    async with working(mesh):
        assert await (await add.publish("k", a=41)).result(60) == 42


@pytest.mark.parametrize("run", ["thread", "process"])
async def test_an_object_and_a_partial_may_be_handlers(mesh: TaskMesh, run: Any) -> None:
    three = mesh.task(run=run, name="add_three")(handlers.add_three)
    four = mesh.task(run=run, name="add_four")(handlers.add_four)
    async with working(mesh):
        assert await (await three.publish("k", 1)).result(60) == 4
        assert await (await four.publish("k", a=1)).result(60) == 5
    with pytest.raises(InvalidParams, match="'a'='one' does not fit"):
        await mesh.publish("add_three", "other", {"a": "one"})


@pytest.mark.usefixtures("own_children")
async def test_a_child_is_used_again(mesh: TaskMesh) -> None:
    own_pid = define(mesh, handlers.own_pid)
    async with working(mesh, concurrency=1):
        pids = [await (await own_pid.publish(str(i))).result(60) for i in range(4)]
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()
    await eventually(lambda: gone(*pids), what="the idle child ends with its consumer")


@pytest.mark.usefixtures("own_children")
async def test_many_short_calls_need_few_children(mesh: TaskMesh) -> None:
    own_pid = define(mesh, handlers.own_pid)
    published = await own_pid.publish_many({str(i): {} for i in range(40)})
    async with working(mesh):
        pids = {await handle.result(60) for handle in published}
    assert len(pids) < 20, "while one starts, another runs many"


@pytest.mark.slow
@pytest.mark.usefixtures("own_children")
async def test_several_run_side_by_side_and_few_stay_idle(
    mesh: TaskMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SURPLUS_S", 1.0)
    wait_for_file = define(mesh, handlers.wait_for_file)
    count = MAX_IDLE + 2
    go = tmp_path / "go"
    async with working(mesh) as consumer:
        tasks = [
            await wait_for_file.publish(str(i), path=str(go), marker=str(tmp_path / f"m{i}")) for i in range(count)
        ]
        await eventually(lambda: len(list(tmp_path.glob("m*"))) == count, what="all run at once")
        pool = parts_of(consumer).executor._processes
        assert pool is not None
        pids = pool.pids
        go.touch()
        assert [await task.result(60) for task in tasks] == ["saw it"] * count
        await eventually(lambda: len(pool.pids) == MAX_IDLE)
        await eventually(lambda: sum(map(gone, pids)) == 2)


async def test_an_execution_that_is_stopped_while_it_waits_for_a_child_costs_none(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_pid = define(mesh, handlers.own_pid)
    door = threading.Event()
    begun: list[Child] = []
    start = processes.Child

    def behind_the_door() -> Child:
        begun.append(start())
        assert door.wait(60)
        return begun[-1]

    monkeypatch.setattr(processes, "Child", behind_the_door)
    async with working(mesh, concurrency=1) as consumer:
        handle = await own_pid.publish("stopped")
        await eventually(lambda: len(begun) == 1)
        assert (await handle.cancel()).status is Status.CANCELLED
        await eventually(lambda: not consumer.running, what="its slot is free")
        door.set()
        assert await (await own_pid.publish("next")).result(60) == begun[0].pid


async def test_a_child_that_dies_after_its_call_costs_none_that_waits_for_it(
    mesh: TaskMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_STARTING", 1)
    own_pid, wait_for_file = define(mesh, handlers.own_pid, option=ONCE), define(mesh, handlers.wait_for_file)
    give_back, started = Processes.give_back, processes.Child

    def dead(pool: Processes, child: Child) -> None:
        monkeypatch.setattr(Processes, "give_back", give_back)
        child.kill()
        assert child.connection.poll(60)  # it has hung up
        give_back(pool, child)

    async with working(mesh, concurrency=2) as consumer:
        first = await wait_for_file.publish("k", path=str(tmp_path / "go"), marker=str(tmp_path / "marker"))
        await eventually((tmp_path / "marker").exists)
        door = threading.Event()
        monkeypatch.setattr(processes, "Child", lambda: door.wait(60) and started())
        second = await own_pid.publish("waits")
        await eventually(lambda: len(consumer.running) == 2)
        monkeypatch.setattr(Processes, "give_back", dead)
        (tmp_path / "go").touch()
        assert await first.result(60) == "saw it"
        door.set()
        assert await second.result(60)


@pytest.mark.usefixtures("own_children")
async def test_a_child_that_is_starting_is_one_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork forgets all of them, or it would hold the pipe by whose end a child sees that its parent is gone."""
    door = threading.Event()
    monkeypatch.setattr(Child, "wait_until_up", lambda _: door.wait(60))
    pool = Processes()
    asked = pool.ask()
    await eventually(lambda: len(pool.pids) == 1)
    [pid] = pool.pids
    door.set()
    child = await anyio.to_thread.run_sync(asked.result, 60)
    assert child.pid == pid
    await anyio.to_thread.run_sync(pool.reap, child)


async def test_where_no_process_can_be_started_the_execution_fails_and_the_next_tries_again(
    mesh: TaskMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_pid = define(mesh, handlers.own_pid, option=AT_ONCE)
    start = processes.Child
    refusals = [OSError("no memory"), RuntimeError("can't start new thread")]

    def short_of_memory() -> Child:
        if refusals:
            raise refusals.pop()
        return start()

    monkeypatch.setattr(processes, "Child", short_of_memory)
    async with working(mesh):
        await own_pid.publish("k")
        task = await finished(mesh, "own_pid", "k", 60)
    assert task.status is Status.SUCCESS
    assert ["could not be started: OSError: no memory" in reason for reason in task.fail_reasons] == [False, True]
    assert ["could not be started: RuntimeError: can't start" in reason for reason in task.fail_reasons] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("fn", "params", "reason"),
    [
        pytest.param(handlers.end_at_once, {"code": 3}, "exit code 3", marks=pytest.mark.slow),
        (handlers.end_at_once, {"code": 0}, "exit code 0"),
        (handlers.segfault, {}, "SIGSEGV"),
        pytest.param(handlers.segfault_with_a_child_that_holds_on, {}, "SIGSEGV", marks=pytest.mark.slow),
        pytest.param(handlers.kill_self, {"number": signal.SIGKILL}, "SIGKILL", marks=pytest.mark.slow),
    ],
    ids=["_exit(3)", "_exit(0)", "segfault", "segfault beside a fork", "SIGKILL"],
)
async def test_a_crash_fails_its_own_execution_with_the_exit_code_or_signal(
    mesh: TaskMesh, tmp_path: Path, fn: Any, params: dict[str, Any], reason: str
) -> None:
    crash = define(mesh, fn, option=ONCE)
    bystander = define(mesh, handlers.wait_for_file)
    go, marker = tmp_path / "go", tmp_path / "marker"
    async with working(mesh):
        other = await bystander.publish("other", path=str(go), marker=str(marker))
        await eventually(marker.exists)
        handle = await crash.publish("k", **params)
        with pytest.raises(TaskError, match=reason) as caught:
            await handle.result(60)
        assert "ProcessDied" in caught.value.reasons[0]
        go.touch()
        assert await other.result(60) == "saw it"


async def test_t28_a_handler_that_kills_its_process_each_time_fails_in_the_end_and_nobody_else_is_charged(
    mesh: TaskMesh, tmp_path: Path
) -> None:
    deadly = define(
        mesh, handlers.end_at_once, option=TaskOption(unexpected_retry_delay_ms=0, max_unexpected_retries=2)
    )
    patient = define(mesh, handlers.wait_for_file)
    go, marker = tmp_path / "go", tmp_path / "marker"
    async with working(mesh):
        bystander = await patient.publish("bystander", path=str(go), marker=str(marker))
        await eventually(marker.exists)
        await deadly.publish("poison", code=1)
        task = await finished(mesh, "end_at_once", "poison", 60)
        go.touch()
        assert await bystander.result(60) == "saw it"
    assert task.status is Status.FAIL
    assert [entry.state for entry in task.task_state.worker_states] == ["FAIL"] * 3
    assert all("ProcessDied" in reason and "exit code 1" in reason for reason in task.fail_reasons)
    assert (task.task_state.timeout_cnt, task.task_state.lost_cnt) == (0, 0), "the worker lives: no lease was lost"
    left = await bystander.task()
    assert ([entry.state for entry in left.task_state.worker_states], left.task_state.lost_cnt) == (["SUCCESS"], 0)


async def test_a_thousand_lines_and_reports_of_a_process_are_bounded(mesh: TaskMesh) -> None:
    talk_a_lot = define(mesh, handlers.talk_a_lot)
    await talk_a_lot.publish("k", lines=1_000)
    async with working(mesh):
        task = await finished(mesh, "talk_a_lot", "k")
    [entry] = task.task_state.worker_states
    assert entry.state == "SUCCESS"
    assert [line.message for line in entry.logs] == [f"line {number}" for number in range(900, 1_000)]
    assert entry.dropped_log_cnt == 900
    assert task.task_state.progress is not None
    assert task.task_state.progress.fraction == 0.999


async def test_after_a_crash_a_retry_has_a_new_child(mesh: TaskMesh, tmp_path: Path) -> None:
    @mesh.task(run="process", option=AT_ONCE)
    def crash_once(path: str) -> str:
        if not Path(path).exists():
            Path(path).touch()
            os._exit(9)
        return "second time"

    async with working(mesh):
        handle = await crash_once.publish("k", path=str(tmp_path / "seen"))
        assert await handle.result(60) == "second time"


async def test_an_idle_child_that_dies_costs_no_execution(mesh: TaskMesh) -> None:
    own_pid = define(mesh, handlers.own_pid, option=ONCE)
    async with working(mesh, concurrency=1):
        first = await (await own_pid.publish("1")).result(60)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: gone(first))
        assert await (await own_pid.publish("2")).result(60) != first


async def test_t33_past_run_timeout_the_process_is_gone_and_its_slot_is_free(mesh: TaskMesh, tmp_path: Path) -> None:
    loop_for_ever = define(mesh, handlers.loop_for_ever, option=ONCE)
    add = define(mesh, handlers.add)
    pid_file = tmp_path / "pid"
    async with working(mesh, concurrency=1):
        handle = await loop_for_ever.configure(run_timeout_ms=3_000).publish("k", pid_file=str(pid_file))
        with pytest.raises(TaskError, match="run_timeout_ms"):
            await handle.result(60)
        assert gone(*await pids_in(pid_file))
        assert await (await add.publish("next", a=1)).result(60) == 2


@pytest.mark.parametrize("fn", [handlers.loop_for_ever, handlers.hold_the_interpreter, handlers.sleep_with_a_program])
async def test_a_cancel_kills_the_process_and_all_that_it_started(mesh: TaskMesh, tmp_path: Path, fn: Any) -> None:
    handler = define(mesh, fn)
    pid_file = tmp_path / "pid"
    async with working(mesh) as consumer:
        handle = await handler.publish("k", pid_file=str(pid_file))
        pids = await pids_in(pid_file)
        assert (await handle.cancel()).status is Status.CANCELLED
        await eventually(lambda: gone(*pids), what="process and program are gone")
        await eventually(lambda: not consumer.running)


async def test_a_stop_kills_the_process_and_gives_the_task_back(mesh: TaskMesh, tmp_path: Path) -> None:
    loop_for_ever = define(mesh, handlers.loop_for_ever)
    pid_file = tmp_path / "pid"
    async with working(mesh) as consumer:
        handle = await loop_for_ever.publish("k", pid_file=str(pid_file))
        pids = await pids_in(pid_file)
        await consumer.stop(grace_ms=0)
    assert gone(*pids)
    task = await handle.task()
    assert task.status is Status.INIT
    assert task.task_state.worker_states == []
    assert task.task_state.timeout_cnt == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("value", "ValueError: a bad value"),
        ("not portable", "here says 7"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("surrogate", r"half \\ud800 a pair"),
    ],
)
async def test_an_exception_is_kept_with_the_line_it_came_from(mesh: TaskMesh, kind: str, reason: str) -> None:
    raise_named = define(mesh, handlers.raise_named, option=ONCE)
    async with working(mesh):
        await raise_named.publish("k", kind=kind)
        task = await finished(mesh, "raise_named", "k")
    [entry] = task.task_state.worker_states
    assert entry.fail_reason is not None
    assert reason.replace(r"\\", "\\") in entry.fail_reason
    assert "raise errors[kind]" in entry.fail_reason
    assert "child.py" not in entry.fail_reason, "the machinery around the handler says nothing"


@pytest.mark.parametrize("kind", ["final", "final, not portable", "final, in a group"])
async def test_task_failed_is_for_good(mesh: TaskMesh, kind: str) -> None:
    raise_named = define(mesh, handlers.raise_named)
    async with working(mesh):
        await raise_named.publish("k", kind=kind)
        task = await finished(mesh, "raise_named", "k")
    assert task.status is Status.FAIL
    assert len(task.task_state.worker_states) == 1


async def test_the_hook_after_sees_the_error_itself(mesh: TaskMesh) -> None:
    raise_named = define(mesh, handlers.raise_named, option=ONCE)
    seen: list[Any] = []
    async with working(mesh, after=lambda _task, ending: seen.append(ending.error)):
        await raise_named.publish("k", kind="value")
        await finished(mesh, "raise_named", "k")
    assert isinstance(seen[0], ValueError)


async def test_retry_and_snooze_mean_what_they_mean_elsewhere(mesh: TaskMesh, tmp_path: Path) -> None:
    retry_once = define(mesh, handlers.retry_once)
    snooze_until = define(mesh, handlers.snooze_until)
    async with working(mesh):
        assert await (await retry_once.publish("k", delay_ms=50)).result(60) == 2
        assert await (await snooze_until.publish("k", path=str(tmp_path / "f"))).result(60) == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("object", r"result\.deep\[0\].*object"), ("lambda", "result.*function"), ("large", "17000.* bytes")],
)
async def test_a_result_that_cannot_be_stored_fails_with_its_place(mesh: TaskMesh, kind: str, reason: str) -> None:
    return_named = define(mesh, handlers.return_named, option=ONCE)
    async with working(mesh):
        handle = await return_named.publish("k", kind=kind)
        with pytest.raises(TaskError, match=reason):
            await handle.result(60)


async def test_current_task_works_in_a_process(mesh: TaskMesh) -> None:
    tell = define(mesh, handlers.tell_about_itself, option=TaskOption(priority=7, run_timeout_ms=60_000))
    async with working(mesh, "w1"):
        handle = await tell.publish("k")
        told: Any = await handle.result(60)
    task = await handle.task()
    [entry] = task.task_state.worker_states
    assert told | {"deadline": None} == {
        "name": "tell_about_itself",
        "key": "k",
        "worker_id": "w1",
        "running_id": entry.running_id,
        "attempt": 1,
        "failures": 0,
        "priority": 7,
        "deadline": None,
        "cancelled": False,
    }
    assert entry.start_time is not None
    assert 50 < (told["deadline"] - entry.start_time).total_seconds() < 70
    assert [line.message for line in entry.logs] == ["the first line"]
    assert task.task_state.progress is not None
    assert (task.task_state.progress.fraction, task.task_state.progress.message) == (0.5, "half way")


async def test_what_current_task_refuses_is_raised_in_the_handler(mesh: TaskMesh) -> None:
    bad_progress = define(mesh, handlers.bad_progress, option=ONCE)
    async with working(mesh):
        handle = await bad_progress.publish("k")
        with pytest.raises(TaskError, match="progress must be from 0 to 1"):
            await handle.result(60)


async def test_a_publish_from_a_process_happens_with_its_success_and_not_without(mesh: TaskMesh) -> None:
    publish_another = define(mesh, handlers.publish_another, option=ONCE)
    add = define(mesh, handlers.add)
    async with working(mesh, names=["publish_another"]):
        await (await publish_another.publish("good", definition_name="add", key="from good")).result(60)
        await publish_another.publish("bad", definition_name="add", key="from bad", fail=True)
        await finished(mesh, "publish_another", "bad")
    assert [task.key async for task in mesh.find("add")] == ["from good"]
    assert add.name == "add"


async def test_a_thread_left_behind_does_not_disturb_the_next_execution(mesh: TaskMesh) -> None:
    late = define(mesh, handlers.log_after_the_end)
    add = define(mesh, handlers.add)
    async with working(mesh, concurrency=1):
        await (await late.publish("k")).result(60)
        for i in range(20):
            assert await (await add.publish(str(i), a=i)).result(60) == i + 1
        logs = [(await mesh.get("add", str(i))).task_state.worker_states[0].logs for i in range(20)]
    assert logs == [[]] * 20


async def test_a_child_takes_no_signals_and_has_none_blocked(mesh: TaskMesh, tmp_path: Path) -> None:
    wait_for_file = define(mesh, handlers.wait_for_file, option=ONCE)
    blocked = define(mesh, handlers.blocked_signals)
    go, marker = tmp_path / "go", tmp_path / "marker"
    async with working(mesh) as consumer:
        assert await (await blocked.publish("k")).result(60) == []
        handle = await wait_for_file.publish("k", path=str(go), marker=str(marker))
        await eventually(marker.exists)
        processes = parts_of(consumer).executor._processes
        assert processes is not None
        for pid in processes.pids:
            assert os.getsid(pid) != os.getsid(0), "the signals of our terminal do not reach it"
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        go.touch()
        assert await handle.result(60) == "saw it"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)])
async def test_what_a_handler_forks_hears_signals(mesh: TaskMesh, number: int, exit_code: int) -> None:
    end_a_fork = define(mesh, handlers.end_a_fork)
    async with working(mesh):
        assert await (await end_a_fork.publish("k", number)).result(60) == exit_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_what_a_handler_forks_has_other_ears_than_the_child_and_none_of_them_shut(
    mesh: TaskMesh, number: int
) -> None:
    """However this process was started."""
    ears = define(mesh, handlers.ears_of_a_fork)
    async with working(mesh):
        assert await (await ears.publish("k", number)).result(60) == {"as the child": False, "blocked": False}


async def test_params_are_turned_into_the_handlers_types_in_the_child_too(mesh: TaskMesh) -> None:
    @mesh.task(run="process")
    def where(path: Path) -> list[str]:
        return [type(path).__name__, str(path)]

    async with working(mesh):
        told = await (await where.publish("k", path=Path("a/b"))).result(60)
    assert told == [type(Path()).__name__, "a/b"]


SCRIPT = """
import asyncio, os, sys, time
from pathlib import Path
from taskmesh import TaskMesh, current_task

mesh = TaskMesh(sys.argv[1] if len(sys.argv) > 1 else None, database=sys.argv[2] if len(sys.argv) > 1 else "x")

class OwnError(Exception): ...

@mesh.task(run="process")
def in_main() -> str:
    return f"{__name__} {current_task().key}"

@mesh.task(run="process")
def write_pid_and_stay(path: str) -> None:
    import re, subprocess
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(f"{os.getpid()} {program.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")

async def main() -> None:
    async with mesh:
        await mesh.consumer().run()

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_handlers_of_a_script_run_and_its_children_die_with_it(
    mesh: TaskMesh, mongo_uri: str, database: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    pid_file = tmp_path / "pids"
    worker = subprocess.Popen([sys.executable, str(script), mongo_uri, database])  # noqa: ASYNC220 — returns at once
    try:
        handle = await mesh.publish("in_main", "k", {})
        assert await handle.result(60) == "__mp_main__ k"
        await mesh.publish("write_pid_and_stay", "k", {"path": str(pid_file)})
        pids = await pids_in(pid_file)
        worker.kill()
        worker.wait()
        await eventually(lambda: gone(*pids), what="the child and its program die with the worker")
    finally:
        worker.kill()
        worker.wait()
