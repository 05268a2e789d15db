"""Faults that a test brings about: a worker that is lost in the middle of a step, a reply of the database that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from taskmesh.consumer import crash_points
from taskmesh.consumer.crash_points import CrashPoint
from taskmesh.model.ids import checked_step_name
from taskmesh.testing import wire
from taskmesh.testing.wire import LostReply, Wire


@contextmanager
def kill_at(step: str) -> Iterator[None]:
    """Lose the worker of the next execution, in this process, that comes to this step: after its function, before its record.

        with kill_at("ship"):
            await drain(mesh)

    Nothing of the execution is recorded from there on: no record, no outcome. Its lease is over at once, as if time had passed,
    and whoever looks next takes the task over: in `drain` the same one. It counts as one lost execution (`max_timeouts`). The
    handler is unwound, where a real crash would not even run its `finally`. `step`: the name as it is shown; the second of one
    name is `ship#2`. Once in each block; raises `AssertionError` at its end if no execution came there.
    """
    point = CrashPoint(checked_step_name("step", step))
    crash_points.asked_for.append(point)
    try:
        yield
        if not point.reached:
            raise AssertionError(
                f"kill_at({step!r}): no execution came to the record of a step of this name in the block: run the task in it, "
                "by drain(mesh) for example, and name the step as Task.steps shows it"
            )
    finally:
        crash_points.asked_for.remove(point)


@contextmanager
def lose_reply(command: str) -> Iterator[None]:
    """Lose the reply to the next MongoDB command of this name, after the server has acted: `update`, `insert`, and so on.

        with lose_reply("update"):
            await drain(mesh)

    For what the fixture `mesh` sends, its own commands and those of handlers that use its client: the driver meets a
    connection that was cut (`AutoReconnect`), and does what it does then. Once in each block. Raises `AssertionError` at its
    end if there was no such command, `RuntimeError` where there is no such fixture or its server is reached by TLS.
    """
    if not isinstance(command, str) or not command.isalpha():
        raise ValueError(f"lose_reply() takes the name of a MongoDB command, like 'update', got {command!r}")
    if not Wire.open:
        raise RuntimeError(
            "lose_reply() works for the mesh of the fixture `mesh`, on one server without TLS: ask for the fixture, and let "
            "TASKMESH_TEST_URI, if it is set, name such a server"
        )
    reply = LostReply(command)
    wire.wanted.append(reply)
    try:
        yield
        if not reply.lost:
            raise AssertionError(f"lose_reply({command!r}): no such command was answered in the block")
    finally:
        wire.wanted.remove(reply)
