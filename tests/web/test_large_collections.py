"""T43: the dashboard does not harm the database: pages stay small, and read by index no more than they show."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from taskmesh import TaskMesh
from taskmesh.admin.store import index_choice
from taskmesh.web import pages

SIZES = [3_000, pytest.param(100_000, marks=pytest.mark.slow)]
PAGES = (
    "/",
    "/tasks",
    "/tasks?where=status:FAIL",
    "/tasks?where=name:job+key:k12",
    "/tasks?where=error:rained",
    "/task?name=job&key=k1",
    "/errors",
    "/workers",
    "/queues",
    "/schedules",
    "/api/v1/tasks",
    "/api/v1/stats",
    "/api/v1/errors",
)
_COUNTED_TO = 500
"""How far pages count what fits, where there are few tasks."""
_LOOKED_AT = 1_001
"""How many documents a query looks at, at the most: so far is counted what waits in a queue, whichever page needs it."""


@pytest.fixture
async def large(mesh: TaskMesh, request: pytest.FixtureRequest) -> int:
    """Make so many tasks with params of 10 kB, half of them failed, out of one that was published; return how many."""
    count = int(request.param)
    await mesh.publish("job", "template", {"text": "x" * 10_000})
    number = {"$toString": "$n"}
    stages: list[dict[str, Any]] = [
        {"$match": {"_id": "job:template"}},
        {"$set": {"n": {"$range": [0, count]}}},
        {"$unwind": "$n"},
        {
            "$set": {
                "_id": {"$concat": ["job:k", number]},
                "key": {"$concat": ["k", number]},
                "status": {"$cond": [{"$mod": ["$n", 2]}, "FAIL", "INIT"]},
            }
        },
        {
            "$set": {
                "task_state.worker_states": {
                    "$cond": [
                        {"$eq": ["$status", "INIT"]},
                        [],
                        [
                            {
                                "state": "FAIL",
                                "final": True,
                                "worker_id": "w",
                                "running_id": "r",
                                "fail_reason": "it rained",
                            }
                        ],
                    ]
                },
                "next_claim_time": {"$cond": [{"$eq": ["$status", "INIT"]}, "$next_claim_time", "$$REMOVE"]},
            }
        },
        {"$unset": "n"},
        {"$merge": {"into": "tasks"}},
    ]
    await (await mesh.store.driver.aggregate("tasks", stages)).to_list(None)
    return count


@pytest.mark.usefixtures("never_used")
@pytest.mark.parametrize("large", SIZES, indirect=True)
async def test_t43_every_page_is_small_and_reads_by_index_what_it_shows(
    mesh: TaskMesh, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    if large < 2 * index_choice.FEW:
        # So few that they can be told from all that there are.
        for module, limit in ((pages, "_COUNT_AT_MOST"), (pages, "_ERRORS_AMONG"), (index_choice, "FEW")):
            monkeypatch.setattr(module, limit, _COUNTED_TO)
    read_more = {
        "/api/v1/errors": 2_000,  # asked for by `at_most`
        "/tasks?where=error:rained": 2 * pages._COUNT_AT_MOST + 1,  # so far is counted what fits: every second task
        "/tasks?where=name:job+key:k12": index_choice.FEW + 1,  # so many may be read to find which index is best
    }
    database = mesh.store.driver.database
    await database.create_collection("system.profile", capped=True, size=64_000_000)
    await database.command({"profile": 2})
    sizes = {}
    reads: dict[str, list[dict[str, Any]]] = {}
    seen = 0
    for page in PAGES:
        answer = await client.get(page)
        assert answer.status_code == 200, f"{page}: {answer.text}"
        sizes[page] = len(answer.content)
        profile = database["system.profile"].find(
            {"ns": f"{database.name}.tasks", "op": {"$in": ["query", "command", "getmore"]}}
        )
        operations = await profile.to_list(None)
        reads[page], seen = operations[seen:], len(operations)
    await database.command({"profile": 0})
    assert {page: size for page, size in sizes.items() if size >= 500_000} == {}
    for page, operations in reads.items():
        for operation in operations:
            told = f"{page}: {operation.get('planSummary')}: {operation['command']}"
            assert not (operation.get("hasSortStage") and "COLLSCAN" in operation.get("planSummary", "")), told
            assert operation.get("responseLength", 0) < 500_000, told
    most = {
        page: max((operation.get("docsExamined", 0) for operation in operations), default=0)
        for page, operations in reads.items()
    }
    assert {page: count for page, count in most.items() if count > read_more.get(page, _LOOKED_AT)} == {}
