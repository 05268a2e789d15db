"""The group commit: outcomes go together, no kind waits for another, and none is lost for an error that is not its own."""

from __future__ import annotations

from taskmesh import TaskMesh
from taskmesh.consumer.finisher import Finisher
from taskmesh.store.finish import Outcome


async def test_a_failure_does_not_wait_until_there_are_no_more_successes(mesh: TaskMesh) -> None:
    finisher = Finisher(mesh.store, "w")
    told: list[str] = []

    def add(kind: str, n: int) -> None:
        finisher.add(Outcome(f"job:{n}", "x", kind), lambda _: told.append(kind))  # type: ignore[arg-type]

    for n in range(6_000):
        add("succeeded", n)
    add("failed", 6_000)
    await finisher.drain()
    assert len(told) == 6_001
    assert told.index("failed") < 4_000
