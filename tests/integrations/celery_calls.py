# The app may be Celery's, which has no types.
# mypy: disable-error-code=untyped-decorator
"""Calls as they stand in programs that use Celery. Celery 5.7.0 answered them once: `peers/celery-5.7.0.json`.

    pip install celery==5.7.0; python tests/integrations/celery_calls.py > tests/integrations/peers/celery-5.7.0.json

ran them on Celery's in-memory broker and result store, with its worker in a thread.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any


def define(app: Any) -> SimpleNamespace:
    """Define the tasks."""

    @app.task(name="shop.add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(name="shop.double")
    def double(x: int) -> int:
        return 2 * x

    @app.task(name="shop.total", queue="celery", ignore_result=False)
    def total(values: list[int], extra: int = 0) -> int:
        return sum(values) + extra

    @app.task(name="shop.flaky", bind=True, max_retries=3, default_retry_delay=0.05)
    def flaky(task: Any, succeeds_at: int) -> list[Any]:
        if task.request.retries < succeeds_at:
            raise task.retry(exc=ValueError("not yet"), countdown=0.05)
        return [task.request.retries, task.name]

    @app.task(name="shop.unstable", bind=True, autoretry_for=(KeyError,), max_retries=2, retry_backoff=0.05)
    def unstable(task: Any, error: str) -> int:
        if task.request.retries < 2:
            raise {"key": KeyError, "value": ValueError}[error]("unstable")
        return int(task.request.retries)

    return SimpleNamespace(add=add, double=double, total=total, flaky=flaky, unstable=unstable)


def answers(tasks: SimpleNamespace, chain: Any, chord: Any, group: Any) -> dict[str, Any]:
    """Make the calls, and return what they give."""
    add, double, total = tasks.add, tasks.double, tasks.total
    found: dict[str, Any] = {}
    for name, result in {
        "delay": add.delay(2, 3),
        "by name": add.delay(2, y=4),
        "apply_async": add.apply_async((2,), {"y": 5}, countdown=0.1, expires=300),
        "signature": add.s(2, 9).apply_async(),
        "chain": chain(add.s(2, 2), add.s(4), double.s())(),
        "pipes": (add.s(1, 1) | double.s() | double.s()).apply_async(),
        "immutable": chain(add.s(1, 1), add.si(5, 5))(),
        "group": group(add.s(n, n) for n in range(4))(),
        "chord": chord([add.s(n, n) for n in range(5)])(total.s()),
        "chord of one": chord([add.s(7, 7)])(total.s(extra=1)),
        "group in a chain": chain(add.s(1, 1), group(add.s(n) for n in range(3)), total.s(), double.s())(),
        "chains in a chord": chord([chain(add.s(n, 1), double.s()) for n in range(3)])(total.s()),
        "retries": tasks.flaky.delay(2),
        "autoretry": tasks.unstable.delay("key"),
    }.items():
        found[name] = result.get(timeout=60)
    for name, result in {"fails": tasks.unstable.delay("value"), "no retries left": tasks.flaky.delay(9)}.items():
        result.get(timeout=60, propagate=False)
        found[name] = [result.state, result.ready(), result.successful(), result.failed()]
    done = add.apply_async((1, 1), task_id="known")
    found["id"] = [done.get(timeout=60), done.id, add.AsyncResult("known").state]
    found["call"] = [add(3, 4), double.s(4)()]
    return found


def _ask_celery() -> None:
    from celery import Celery, chain, chord, group  # type: ignore[import-not-found]  # noqa: PLC0415 -- in its own environment
    from celery.contrib.testing.worker import start_worker  # type: ignore[import-not-found]  # noqa: PLC0415 -- the same

    app = Celery("shop", broker="memory://", backend="cache+memory://")
    tasks = define(app)
    with start_worker(app, perform_ping_check=False, concurrency=4, pool="threads", queues=["celery"]):
        print(json.dumps(answers(tasks, chain, chord, group), indent=1))  # noqa: T201 -- that is what it is for


if __name__ == "__main__":
    _ask_celery()
