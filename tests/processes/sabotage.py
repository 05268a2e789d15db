"""Broken parts, put into a worker on purpose: a test shows that the rest holds without them, or that somebody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from taskmesh.consumer.claimer import Claimer
from taskmesh.consumer.executor import Executor
from taskmesh.consumer.run import finisher
from taskmesh.consumer.run.execution import Execution
from taskmesh.consumer.run.finisher import Finisher
from taskmesh.consumer.run.pinger import Pinger
from taskmesh.consumer.run.stop_reasons import Stop
from taskmesh.store.finish import finish
from taskmesh.store.mongodb.driver import Driver

PARTS: dict[str, Callable[[], None]] = {}


def part(function: Callable[[], None]) -> Callable[[], None]:
    """Enter a way of breaking under its function's name."""
    PARTS[function.__name__] = function
    return function


@part
def notices_no_loss() -> None:
    """The worker trusts its lease for ever, so that whatever it sends late does reach the server."""

    def renewed(self: Execution, sent: float) -> None:
        self.lease_until = float("inf")
        self.next_ping = sent + self.stored_option["ping_interval_ms"] / 1000

    def ignore(*_: object) -> None: ...

    stop = Execution.stop

    def stop_for_another_reason(self: Execution, reason: Stop) -> None:
        if reason is not Stop.LEASE_LOST:
            stop(self, reason)

    def ping_on(_: Pinger, execution: Execution) -> None:
        execution.ping_again(time.monotonic())

    replace(Execution, "renewed", renewed)
    replace(Execution, "check_lease", ignore)
    replace(Execution, "stop", stop_for_another_reason)
    replace(Pinger, "_give_up", ping_on)


@part
def dies_before_the_claim() -> None:
    """It knows of the task, and dies before it asks for it."""
    replace(Claimer, "_claim_set", _die)


@part
def dies_before_the_handler() -> None:
    """It has won the task, and dies before it starts the handler."""
    replace(Executor, "start", _die)


@part
def dies_in_the_handler() -> None:
    """It dies a moment after the handler has started."""
    handle = Executor._handle

    async def handle_and_die(*arguments: Any) -> Any:
        asyncio.get_running_loop().call_later(0.1, _die)
        return await handle(*arguments)

    replace(Executor, "_handle", handle_and_die)


@part
def dies_before_the_record() -> None:
    """The handler has returned, and nobody outside knows."""
    replace(Finisher, "add", _die)


@part
def dies_before_the_record_is_answered() -> None:
    """The server has recorded the outcome, and the worker has not heard of it."""

    async def record_and_die(*arguments: Any, **settings: Any) -> Any:
        await finish(*arguments, **settings)
        return _die()

    finisher.finish = record_and_die  # type: ignore[attr-defined]  # its own import of the verb


@part
def dies_after_the_record() -> None:
    """The worker has heard that its outcome is recorded, and dies before it does anything else."""
    replace(Executor, "_over", _die)


@part
def believes_one_server() -> None:
    """Whatever it asks of what a majority has, it asks of what the primary has by now."""
    collection = Driver.collection

    def local(self: Driver, *what: Any, **settings: Any) -> Any:
        return collection(self, *what, **settings | {"majority": False})

    replace(Driver, "collection", local)


def _die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def replace(owner: Any, name: str, by: Any) -> None:
    """Put something broken in the place of a method or a function, for the rest of this process's life."""
    assert callable(getattr(owner, name, None)), f"{owner.__name__}.{name} is gone: what is to be broken in its place?"
    setattr(owner, name, by)
