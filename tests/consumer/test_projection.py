"""`projection=`: a worker loads only those params; the others stay in the database, and keep their defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from taskmesh import InvalidOption, TaskMesh

LARGE = "large " * 1_000


class Replies(CommandListener):
    """What the server has sent, by command."""

    def __init__(self) -> None:
        self.with_large: set[str] = set()

    def started(self, event: CommandStartedEvent) -> None: ...
    def failed(self, event: CommandFailedEvent) -> None: ...
    def succeeded(self, event: CommandSucceededEvent) -> None:
        if LARGE in str(event.reply):
            self.with_large.add(event.command_name)


@pytest.mark.parametrize("tasks", [1, 30], ids=["one", "a set"])
async def test_the_others_are_neither_sent_nor_lost(mongo_uri: str, database: str, tasks: int) -> None:
    replies = Replies()
    async with (
        AsyncMongoClient[dict[str, Any]](mongo_uri, event_listeners=[replies]) as client,
        TaskMesh(client, database=database) as mesh,
    ):

        @mesh.task(projection=["path", "size.width"])
        async def index(path: str, size: dict[str, int], text: str = "left out", n: int = 7) -> list[Any]:
            return [path, size, text, n]

        handles = await index.publish_many(
            {
                str(n): {"path": f"{n}.txt", "size": {"width": n, "height": n}, "text": LARGE, "n": n}
                for n in range(tasks)
            }
        )
        await mesh.consumer(worker_id="w1").run(until_idle=True)
        for n, handle in enumerate(handles):
            assert await handle.result(timeout=60) == [f"{n}.txt", {"width": n}, "left out", 7]
        assert replies.with_large == set()
        assert (await mesh.get("index", "0")).params == {
            "path": "0.txt",
            "size": {"width": 0, "height": 0},
            "text": LARGE,
            "n": 0,
        }
        assert replies.with_large != set(), "this would have been noticed"


def takes_both(path: str, size: int) -> None: ...


def takes_anything(path: str, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "projection", "told"),
    [
        (takes_both, ["path"], "leaves out size: give it a default, or load it"),
        (takes_both, ["path", "size", "colour"], "names colour, which it does not take"),
        (takes_both, "path", "a list of parameter names"),
        (takes_both, [], "a list of parameter names"),
        (takes_anything, ["colour"], "leaves out path"),
    ],
)
def test_one_that_no_execution_could_be_called_with_is_refused(
    handler: Callable[..., Any], projection: Any, told: str
) -> None:
    with pytest.raises(InvalidOption, match=told):
        TaskMesh().task(projection=projection)(handler)


def test_a_handler_that_takes_anything_may_ask_for_anything() -> None:
    TaskMesh().task(projection=["path", "colour"])(takes_anything)
