"""The agent of the example, killed between any two calls and in each, goes on, and makes no recorded call again."""

from __future__ import annotations

from collections import defaultdict

from taskmesh import TaskMesh
from tests.durable.test_suspension import suspended
from tests.examples.agent_worker import VICTIM, define
from tests.processes.fleet import Fleet
from tests.waiting import eventually

CALLS = ["answer 1", "search ants at work", "search ants at rest", "answer 3", "publish ", "answer 5"]
PLACES = [f"{when}-{n}" for n in range(1, len(CALLS) + 1) for when in ("before", "after")]


def calls_by_key(fleet: Fleet, what: str) -> defaultdict[str, list[str]]:
    """Return the calls of each task of which this was noted."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for mark in fleet.history:
        if mark.what == what:
            found[mark.key].append(mark.more["call"])
    return found


async def test_killed_between_any_two_calls_it_goes_on(mesh: TaskMesh, fleet: Fleet) -> None:
    research = define(mesh)
    handles = await research.publish_many({key: {"topic": "ants"} for key in [*PLACES, "undecided"]})
    for handle in handles[:-1]:
        await handle.signal("verdict", {"approved": True})
    victim = fleet.start(VICTIM, handlers="tests.examples.agent_worker", concurrency=len(handles))

    async def all_hang() -> bool:
        """Each is where it is to be killed, and what it has done besides is recorded."""
        did, hangs = calls_by_key(fleet, "did"), calls_by_key(fleet, "hangs")
        open_ones = {key: len(did[key]) - key.startswith("after") for key in PLACES}
        tasks = [await mesh.get("research", key) for key in PLACES]
        recorded = {task.key: sum(step.kind == "step" for step in task.steps) for task in tasks}
        return set(hangs) == set(PLACES) and all(recorded[key] == count for key, count in open_ones.items())

    await eventually(all_hang, what="each task has come to its place")
    await suspended(mesh, "research", "undecided")
    victim.kill()
    fleet.start("rescuer", handlers="tests.examples.agent_worker", concurrency=len(handles)).wait_ready()
    await handles[-1].signal("verdict", {"approved": True})
    for handle in handles:
        assert await handle.result(90) == "Done: Ants is published"

    did, hung = calls_by_key(fleet, "did"), calls_by_key(fleet, "hangs")
    for key in [*PLACES, "undecided"]:
        again = hung[key] if key.startswith("after") else []
        assert sorted(did[key]) == sorted([*CALLS, *again]), key
    report = (fleet.history_directory / "reports" / "ants.md").read_text()
    assert (
        report == "# Ants\n\nAnts carry fifty times their weight.\nAnts nap about two hundred and fifty times a day.\n"
    )


async def test_what_is_refused_is_not_published(mesh: TaskMesh, fleet: Fleet) -> None:
    research = define(mesh)
    fleet.start(handlers="tests.examples.agent_worker")
    handle = await research.publish("1", topic="ants")
    await handle.signal("verdict", {"reason": "too short"})
    assert await handle.result(60) == "Done: too short"
    assert not (fleet.history_directory / "reports").exists()
