"""Records with fields: what a handler logs says of which task it is; the JSON has every field, and survives any value."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from taskmesh import TaskFailed, TaskMesh
from taskmesh.logs import JsonFormatter, TaskFields
from tests.working import finished, working


class Kept(logging.Handler):
    """Keeps the lines that it would have written."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(TaskFields())
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def that_say(self, text: str) -> list[dict[str, object]]:
        """Return the records with this text in their message."""
        return [record for line in self.lines if text in (record := json.loads(line))["message"]]


@pytest.fixture
def log() -> Iterator[Kept]:
    """What is logged during a test."""
    handler, root = Kept(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


async def test_handlers_and_the_engine_say_of_which_execution_they_speak(mesh: TaskMesh, log: Kept) -> None:
    @mesh.task
    async def work() -> None:
        logging.getLogger("app").info("in the loop")
        raise TaskFailed("no use\nat all")

    @mesh.task
    def plain() -> None:
        logging.getLogger("app").info("in a thread")

    await work.publish("k1")
    await plain.publish("k2")
    async with working(mesh, "w1"):
        failed = await finished(mesh, "work", "k1")
        done = await finished(mesh, "plain", "k2")
    for task, text in ((failed, "in the loop"), (failed, "task work:k1 failed: no use"), (done, "in a thread")):
        [record] = log.that_say(text)
        running_id = task.task_state.worker_states[0].running_id
        assert (record["task"], record["key"], record["worker"]) == (task.name, task.key, "w1")
        assert record["running_id"] == running_id
    logging.getLogger("app").info("outside")
    assert "task" not in log.that_say("outside")[0]


def test_a_record_is_one_line_of_json_whatever_is_in_it(log: Kept) -> None:
    error = ValueError("two\nlines")
    extra = {"odd": {1: object()}, "task": "mine"}
    logging.getLogger("app").error("it %s\nfailed", "really", exc_info=error, extra=extra)
    [line] = log.lines
    assert "\n" not in line
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("error", "app", "it really\nfailed")
    assert record["task"] == "mine"
    assert record["exception"].endswith("ValueError: two\nlines")
