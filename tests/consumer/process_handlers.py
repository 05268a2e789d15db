"""Plain functions that tests run in child processes: a child imports this module by its name."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from taskmesh import LeaseLost, Retry, Snooze, TaskFailed, TaskMeshError, current_blocking_task, current_task


class NotPortable(Exception):
    """Cannot be unpickled: its arguments are not its text's."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{place} says {code}")
        self.code = code


class FinalNotPortable(TaskFailed):
    """A TaskFailed that cannot be unpickled."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{place} says {code}, for good")


class Trap:
    """Makes a directory wherever it is unpickled."""

    path = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class TrapError(Trap, Exception): ...


class TrapRetry(Trap, Retry): ...


class TrapNumber(Trap, float): ...


class TrapText(Trap, str):  # noqa: SLOT000 — one with slots could not be a trap as well
    pass


def set_trap(way: str, path: str) -> Any:
    """Say something to the parent that runs code if it is unpickled."""
    Trap.path = path
    task = current_blocking_task()
    if way == "error":
        raise TrapError("snap")
    if way == "retry" and task.attempt == 1:
        raise TrapRetry("snap", delay_ms=10)
    if way == "log":
        task.log(TrapText("snap"))
    if way == "progress":
        task.progress(TrapNumber(0.5), TrapText("snap"))
    if way == "publication":
        task.publish("add", TrapText("trapped"), a=TrapNumber(2.0))
    return TrapNumber(1.0)


def say_bytes(said: bytes) -> None:
    """Say this on every socket there is, one of which leads to the parent."""
    for fd in range(3, 64):
        if os.path.exists(f"/dev/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode):  # noqa: PTH110 — a descriptor
            os.write(fd, said)
    time.sleep(60)


def add(a: int, b: int = 1) -> int:
    return a + b


def end_a_fork(number: int) -> int | None:
    """Send a signal to a fork, as a pool of `multiprocessing` does to its own, and return how that ended, if it did."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    fork = context.Process(target=_sleep, args=[begun])
    fork.start()
    begun.wait()
    assert fork.pid is not None
    os.kill(fork.pid, number)
    fork.join(50)
    exit_code = fork.exitcode
    fork.kill()
    return exit_code


def ears_of_a_fork(number: int) -> dict[str, bool]:
    """Tell whether a fork would hear a signal as this process does, and whether it would have to wait for it."""
    mine = signal.getsignal(number)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        same, blocked = signal.getsignal(number) is mine, number in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.write(writer, bytes([same, blocked]))
        os._exit(0)
    os.waitpid(pid, 0)
    same, blocked = map(bool, os.read(reader, 2))
    return {"as the child": same, "blocked": blocked}


def _sleep(begun: Any) -> None:
    try:
        begun.set()
        for _ in range(1_200):  # shortly: a signal that comes just before a sleep is heard after it
            time.sleep(0.1)
    except KeyboardInterrupt:
        os._exit(0)  # at once: what Python does at its end may wait for locks that other threads held at the fork


class Adder:
    """A handler that is an object."""

    def __init__(self, b: int) -> None:
        self.b = b

    def __call__(self, a: int) -> int:
        return a + self.b


add_three = Adder(3)
add_four = partial(add, b=4)


def own_pid() -> int:
    return os.getpid()


def end_at_once(code: int) -> None:
    os._exit(code)


def segfault() -> None:
    ctypes.string_at(0)


def segfault_with_a_child_that_holds_on() -> None:
    """Die with a fork still alive that holds all our file descriptors open."""
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    ctypes.string_at(0)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def loop_for_ever(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    while True:
        pass


def sleep_with_a_program(pid_file: str, seconds: float = 60) -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(pid_file).write_text(f"{os.getpid()} {program.pid}")
    time.sleep(seconds)


def hold_the_interpreter(pid_file: str) -> None:
    """Sit in native code that never lets another thread of this process run."""
    Path(pid_file).write_text(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")


def wait_for_file(path: str, marker: str) -> str:
    Path(marker).touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return "saw it"


def raise_named(kind: str) -> None:
    errors: dict[str, BaseException] = {
        "value": ValueError("a bad value"),
        "not portable": NotPortable(7, "here"),
        "final": TaskFailed("no use"),
        "final, not portable": FinalNotPortable(7, "here"),
        "final, in a group": ExceptionGroup("two", [ValueError("a"), TaskFailed("no use")]),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "surrogate": ValueError("half \ud800 a pair"),
    }
    raise errors[kind]


def retry_once(delay_ms: int) -> int:
    if current_task().attempt == 1:
        raise Retry("not yet", delay_ms=delay_ms)
    return int(current_task().attempt)


def snooze_until(path: str) -> int:
    if not Path(path).exists():
        Path(path).touch()
        raise Snooze(delay_ms=0)
    return int(current_task().attempt)


def return_named(kind: str) -> Any:
    values: dict[str, Any] = {
        "object": {"deep": [object()]},
        "lambda": lambda: None,
        "large": b"x" * 17_000_000,
        "tuple": (1, "two", b"3"),
    }
    return values[kind]


class Unit(Enum):
    METRE = "m"


@dataclass
class Measured:
    unit: Unit
    values: set[int]


def measured() -> Measured:
    return Measured(Unit.METRE, {1, 2})


def not_a_number() -> int:
    return "top secret"  # type: ignore[return-value]  # what is tested


def extra_of_it() -> dict[str, Any]:
    return dict(current_task().extra)


def tell_about_itself() -> dict[str, Any]:
    task = current_blocking_task()
    task.log("the first line")
    task.progress(0.5, "half way")
    return {
        "name": task.name,
        "key": task.key,
        "worker_id": task.worker_id,
        "running_id": task.running_id,
        "attempt": task.attempt,
        "failures": task.failures,
        "priority": task.option.priority,
        "deadline": task.deadline,
        "cancelled": task.cancelled,
    }


def talk_a_lot(lines: int) -> None:
    task = current_blocking_task()
    for number in range(lines):
        task.progress(number / lines)
        task.log(f"line {number}")


def bad_progress() -> None:
    current_blocking_task().progress(2)


def publish_another(definition_name: str, key: str, fail: bool = False) -> None:
    current_blocking_task().publish(definition_name, key, a=1)
    if fail:
        raise ValueError("after the publish")


def log_after_the_end() -> None:
    """Leave a thread behind that goes on to speak for this execution when it has ended."""
    task = current_task()

    def speak() -> None:
        for _ in range(200):
            task.log("too late")
            time.sleep(0.001)

    threading.Thread(target=speak, daemon=True).start()


def blocked_signals() -> list[int]:
    return sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def order_in_transaction(database: str, n: int, ending: str = "") -> str:
    task = current_blocking_task()
    with task.transaction() as session:
        session.client[database]["orders"].insert_one({"n": n}, session=session)
        task.publish("add", f"after {n}", a=n)
        if ending == "raise":
            raise ValueError("changed my mind")
        if ending == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.2)
        task.set_result({1} if ending == "set" else f"ordered {n}")
    return "not this"


def publish_after_the_block(path: str) -> None:
    """Write down why the second publication was refused."""
    task = current_blocking_task()
    with task.transaction():
        task.publish("add", "inside", a=1)
    try:
        task.publish("add", "after", a=1)
    except LeaseLost as error:
        Path(path).write_text(str(error))


def result_outside(where: str, path: str) -> str:
    """Say a result where no block is open; after the block it is too late to fail, so write down why it was refused."""
    task = current_blocking_task()
    if where == "before":
        task.set_result("lost")
    with task.transaction():
        task.set_result("inside")
    try:
        task.set_result("late")
    except TaskMeshError as error:
        Path(path).write_text(str(error))
    return "not this"


def move_in_block(database: str, attempts: str) -> str:
    """Take from the account `a` and give to `b`, in a block. `attempts`: a file that is one byte longer after each."""
    task = current_blocking_task()
    with Path(attempts).open("a") as file:
        file.write("x")
    with task.transaction() as session:
        move(session, database)
        task.set_result("moved")
    return "not this"


def move_in_place(database: str, attempts: str) -> str:
    """Do the same by `in_transaction`."""

    def moving(session: Any) -> str:
        with Path(attempts).open("a") as file:
            file.write("x")
        move(session, database)
        return "moved"

    moved: str = current_blocking_task().in_transaction(moving)
    return moved


def move(session: Any, database: str) -> None:
    current_blocking_task().publish("add", "receipt", a=1)
    accounts = session.client[database]["accounts"]
    accounts.update_one({"_id": "a"}, {"$inc": {"cents": -1}}, session=session)
    accounts.update_one({"_id": "b"}, {"$inc": {"cents": 1}}, session=session)


def half_if_told(door: str) -> str:
    """Work until there is a file `door`; return early, with half of the work done, as soon as it is told to stop."""
    task = current_blocking_task()
    task.progress(0.1)
    while not Path(door).exists():
        if task.cancelled:
            return "half"
        time.sleep(0.001)
    return "whole"


def tell_deadline_after(seconds: float) -> list[Any]:
    """Return when it began and its deadline, after so long."""
    began = datetime.now(UTC)
    time.sleep(seconds)
    return [began, current_task().deadline]


class Elsewhere(LookupError):
    """An error of this module."""


def raise_by_policy(kind: str) -> int:
    """Raise this kind of error at the first attempt."""
    if current_blocking_task().attempt > 1:
        return 1
    if kind == "unknown to the parent":
        raise type("OnlyHere", (Elsewhere,), {})("made up")
    if kind == "a group":
        raise ExceptionGroup("two", [KeyError("a"), TimeoutError("b")])
    if kind == "dies":
        os._exit(1)
    raise {"derived": Elsewhere, "timeout": TimeoutError, "other": ValueError}[kind](kind)


def state() -> Any:
    return current_blocking_task().state


def keep_a_secret(card: SecretStr, text: str) -> dict[str, str]:
    """Use everything that leaves something in the database, with what must not stand there in the clear."""
    task = current_blocking_task()
    task.log(f"log {text} {card.get_secret_value()}")
    task.progress(0.5, f"progress {text}")
    stepped = task.step("make", "step {}".format, text)
    return {"stepped": stepped, "card": card.get_secret_value()}
