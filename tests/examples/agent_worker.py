"""What the workers of `test_agent.py` run: the agent of the example. It notes its calls, and hangs where it is to be killed.

The key of a task says where: `before-3` in the process of the victim just before the third call, `after-3` when the third call
is made, but not recorded.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic_ai.models.function import FunctionModel

from examples.agent import app, offline
from taskmesh import TaskMesh, current_task
from taskmesh.client.definition import TaskDefinition
from tests.durable.handlers import SHORT_LEASE
from tests.processes.history import Notebook

VICTIM = "victim"


def define(mesh: TaskMesh, directory: Path | None = None) -> TaskDefinition[Any, str]:
    """Define the task. `directory`: where to write the history, and the reports; None in a process that only publishes."""
    definition: Any = mesh.task(app.research.fn, name="research", option=SHORT_LEASE.changed(worker_timeout_ms=5_000))
    if directory is None:
        return cast("TaskDefinition[Any, str]", definition)
    book = Notebook(directory)
    begun: Counter[str] = Counter()

    def noted(fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        async def called(*args: Any, **kwargs: Any) -> Any:
            task = current_task()
            begun[task.key] += 1
            at = begun[task.key] if task.worker_id == VICTIM else None
            call = f"{fn.__name__} {kwargs.get('words', '')}{len(args[0]) if args else ''}"
            if task.key == f"before-{at}":
                await _hang(book, call)
            value = fn(*args, **kwargs)
            value = await value if inspect.isawaitable(value) else value
            book.note("did", call=call)
            if task.key == f"after-{at}":
                await _hang(book, call)
            return value

        return called

    app.reports = directory / "reports"
    app.search, app.publish = noted(app.search), noted(app.publish)
    app.agent = app.researcher(FunctionModel(noted(offline.answer)))
    return cast("TaskDefinition[Any, str]", definition)


async def _hang(book: Notebook, call: str) -> None:
    book.note("hangs", call=call)
    await asyncio.Event().wait()
