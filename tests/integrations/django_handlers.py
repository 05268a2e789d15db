"""The tasks of Django that `django_conformance.py` enqueues."""

from __future__ import annotations

from typing import Any

from taskmesh import Retry
from tests.integrations.django_here import tasks

ran: list[str] = []
"""What has run, in order."""


@tasks.task
def add(a: int, b: int = 1) -> int:
    ran.append(f"add {a}")
    return a + b


@tasks.task
async def greet(name: str) -> dict[str, Any]:
    return {"hello": [name]}


@tasks.task(takes_context=True)
def who(context: Any) -> dict[str, Any]:
    return {"id": context.task_result.id, "attempt": context.attempt, "status": context.task_result.status}


@tasks.task
def fail(why: str) -> None:
    raise LookupError(why)


@tasks.task(backend="patient", takes_context=True)
def fail_twice(context: Any) -> int:
    if context.attempt < 3:
        raise ValueError(f"attempt {context.attempt}")
    return int(context.attempt)


@tasks.task
def ask_again() -> None:
    raise Retry("busy", delay_ms=0)


@tasks.task(backend="tireless")
def fail_always() -> None:
    raise ValueError("always")


@tasks.task(queue_name="other", priority=5)
def elsewhere() -> None:
    ran.append("elsewhere")


@tasks.task
def unstorable() -> object:
    return object()
