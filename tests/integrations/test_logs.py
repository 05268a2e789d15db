"""Records with fields: what a handler logs says of which task it is; the JSON has every field, and survives any value."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from taskmesh import TaskFailed, TaskMesh, TaskOption, current_task
from taskmesh.consumer.logs import JsonFormatter, TaskFields
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
    for task, text in (
        (failed, "in the loop"),
        (failed, "task work:k1 failed for good: no use"),
        (done, "in a thread"),
    ):
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


async def test_a_final_failure_is_an_error_and_a_retry_a_warning_each_with_its_traceback(
    mesh: TaskMesh, log: Kept
) -> None:
    @mesh.task(option=TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=0))
    async def work() -> None:
        raise KeyError("which?")

    @mesh.task
    async def refused() -> None:
        raise TaskFailed("no use")

    @mesh.task(option=TaskOption(max_unexpected_retries=0))
    async def odd() -> object:
        return object()  # it cannot be stored

    @mesh.task(option=TaskOption(max_unexpected_retries=0), run="process")
    def elsewhere() -> int:
        return int("x")

    for definition in (work, refused, odd, elsewhere):
        await definition.publish("k")
    async with working(mesh, "w1"):
        for definition in (work, refused, odd, elsewhere):
            await finished(mesh, definition.name, "k")
    told = {
        name: [(record["level"], record["message"]) for record in log.that_say(f"task {name}:k failed")]
        for name in ("work", "refused", "odd", "elsewhere")
    }
    assert told["work"] == [
        ("warning", "task work:k failed and will be retried (1 of 1): KeyError: 'which?'"),
        ("error", "task work:k failed for good: KeyError: 'which?'"),
    ]
    assert told["refused"] == [("error", "task refused:k failed for good: no use")]
    assert [level for level, _ in told["odd"]] == ["error"]
    assert [level for level, _ in told["elsewhere"]] == ["error"]
    for record in (*log.that_say("task work:k failed"), *log.that_say("task refused:k failed")):
        assert "in work" in str(record["exception"]) or "in refused" in str(record["exception"])
        assert (record["key"], record["worker"]) == ("k", "w1")
    [record] = log.that_say("task elsewhere:k failed")
    assert "invalid literal for int()" in str(record["exception"])


async def test_successes_are_told_singly_while_they_are_few_and_counted_where_they_are_many(
    mesh: TaskMesh, log: Kept
) -> None:
    @mesh.task
    async def quick() -> None:
        pass

    @mesh.task
    async def in_one() -> None:
        async with current_task().transaction():
            pass

    @mesh.task
    async def with_another() -> None:
        await current_task().publish("nobody-runs-it", "k")

    await in_one.publish("k")
    await with_another.publish("k")
    async with working(mesh, "w1"):
        await finished(mesh, "in_one", "k")
        await finished(mesh, "with_another", "k")
        await quick.publish_many({f"k{n}": {} for n in range(200)})
        for n in range(200):
            await finished(mesh, "quick", f"k{n}")
    for name in ("in_one", "with_another"):
        [record] = log.that_say(f"task {name}:k succeeded after")
        assert (record["level"], record["task"], record["worker"]) == ("info", name, "w1")
    singly = log.that_say("task quick:")
    counted = [int(str(record["message"]).split()[0]) for record in log.that_say("more tasks succeeded")]
    assert len(singly) + sum(counted) == 200
    assert counted
