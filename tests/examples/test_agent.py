"""The agent of the example, killed between any two calls and in each, goes on, and makes no recorded call again."""

from __future__ import annotations

from collections import Counter, defaultdict

from taskmesh import TaskMesh
from tests.durable.test_suspension import suspended
from tests.examples.agent_worker import VICTIM, define
from tests.processes.fleet import Fleet
from tests.waiting import eventually

CALLS = {"answer 1": 1, "search ants at work": 1, "search ants at rest": 1, "answer 3": 1, "publish ": 1, "answer 5": 1}
PLACES = [f"{when}-{n}" for n in range(1, len(CALLS) + 1) for when in ("before", "after")]


async def test_killed_between_any_two_calls_it_goes_on(mesh: TaskMesh, fleet: Fleet) -> None:
    research = define(mesh)
    handles = await research.publish_many({key: {"topic": "ants"} for key in [*PLACES, "undecided"]})
    for handle in handles[:-1]:
        await handle.signal("verdict", {"approved": True})
    victim = fleet.start(VICTIM, handlers="tests.examples.agent_worker", concurrency=len(handles))

    def hanging() -> bool:
        return {mark.key for mark in fleet.history if mark.what == "hangs"} == set(PLACES)

    await eventually(hanging, what="each task has come to its place")
    await suspended(mesh, "research", "undecided")
    victim.kill()
    fleet.start("rescuer", handlers="tests.examples.agent_worker", concurrency=len(handles)).wait_ready()
    await handles[-1].signal("verdict", {"approved": True})
    for handle in handles:
        assert await handle.result(90) == "Done: Ants is published"

    made: dict[str, Counter[str]] = defaultdict(Counter)
    last: dict[str, str] = {}
    for mark in fleet.history:
        if mark.what == "did":
            made[mark.key][mark.more["call"]] += 1
            last.setdefault(mark.key, "")
            if mark.worker_id == VICTIM:
                last[mark.key] = mark.more["call"]
    for place in [*PLACES, "undecided"]:
        again = {call: count for call, count in made[place].items() if count != CALLS.get(call)}
        allowed = {last[place]: 2} if place.startswith("after") else {}
        assert again in ({}, allowed), place
        assert set(made[place]) == set(CALLS), place
    assert sum(2 in counts.values() for counts in made.values()) == len(CALLS), "what was not recorded was called again"
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
