"""Three servers whose primary goes again and again, and workers that are killed: what is recorded stands, and all of it ends."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from taskmesh import TaskMesh, TaskMeshError, TaskNotFound
from tests.durable.order_handlers import ACCOUNTS, MEMBERS, TRANSFERS, Handlers, define
from tests.mongods import ThreeNodes, quick_directory, three_nodes
from tests.processes.fleet import Fleet, Worker
from tests.processes.history import Mark
from tests.waiting import eventually, wait_until

pytestmark = [pytest.mark.failover, pytest.mark.blocks_the_loop]  # servers and workers are started by blocking calls

logger = logging.getLogger(__name__)
_FLOWS = 12
_ROUNDS = 12
_CENTS = 100
_PATIENCE_S = 120.0


@pytest.fixture
def nodes() -> Iterator[ThreeNodes]:
    # A worker that is killed in a transaction leaves its locks: for a minute, if the server is not told otherwise.
    with quick_directory() as directory, three_nodes(directory, {"transactionLifetimeLimitSeconds": 3}) as started:
        yield started


async def test_whatever_is_killed_what_is_recorded_stands_and_all_of_it_ends(
    nodes: ThreeNodes, database: str, tmp_path: Path
) -> None:
    """Kill -9 of workers and of the primary, and elections: steps, transfers, signals, children and flows."""
    with Fleet(nodes.uri, database, tmp_path / "fleet") as fleet, MongoClient[dict[str, Any]](nodes.uri) as client:
        shop = client[database]
        shop["accounts"].insert_many([{"_id": n, "cents": _CENTS} for n in range(ACCOUNTS)])
        for name in ("moves", "joins"):
            shop.create_collection(name)
        async with TaskMesh(nodes.uri, database=database) as mesh:
            handlers = define(mesh)
            flows = [f"f{n}" for n in range(_FLOWS)]
            orders = [f"{flow}-{n}" for flow in flows for n in range(MEMBERS)]
            chaos = _Chaos(nodes, fleet, random.Random(14))
            unsignalled = list(orders)
            for n in range(_ROUNDS):
                await _published(handlers, flows[n::_ROUNDS])
                await chaos.round(n)
                unsignalled = await _signalled(mesh, unsignalled)
            nodes.heal()

            async def all_are_signalled() -> bool:
                unsignalled[:] = await _signalled(mesh, unsignalled)
                return not unsignalled

            await eventually(all_are_signalled, _PATIENCE_S)
            for flow in flows:
                value = await mesh.flow(flow).result(_PATIENCE_S)
                assert value == {("settled", flow): MEMBERS * 8}, "7 by each signal, 0 and 1 by its children"
            for key in orders:
                task = await mesh.get("order", key)
                names = [step.name.partition(" of ")[0] for step in task.steps if step.kind != "start"]
                assert sorted(names) == sorted(["begin", "transfer-0", "go on", "nap", "results", "transfer-1", "end"])
                assert task.task_state.signals == []
            expected = _FLOWS * (2 + 3 * MEMBERS)  # who publishes it, who comes last, and orders with two children each
            assert (await mesh.listing.count(), await mesh.listing.count("status:SUCCESS")) == (expected, expected)
        moves, joins = (Counter(each["of"] for each in shop[name].find()) for name in ("moves", "joins"))
        cents = sum(account["cents"] for account in shop["accounts"].find())
    assert moves == {f"{key}/{n}": 1 for key in orders for n in range(TRANSFERS)}
    assert cents == ACCOUNTS * _CENTS
    assert joins == dict.fromkeys(flows, 1)
    _check_history(fleet.history)
    lost = sum(mark.what == "did" for mark in fleet.history) - 2 * len(orders)
    logger.info("%d steps were done again, since nobody had recorded them", lost)


class _Chaos:
    """Two workers. In each round one is killed, and in every other the primary goes, by SIGKILL or by stepping down."""

    def __init__(self, nodes: ThreeNodes, fleet: Fleet, chance: random.Random) -> None:
        self._nodes, self._fleet, self._chance = nodes, fleet, chance
        self._living = [self._worker() for _ in range(2)]

    async def round(self, n: int) -> None:
        wait_until(lambda: all("ready" in worker.told for worker in self._living), what="both are at work")
        await asyncio.sleep(2.0 * self._chance.random())  # the moment of a kill is what the test is about
        if n % 2:
            self._nodes.primary_goes(killed=n % 4 == 1)
            await asyncio.sleep(1.0 * self._chance.random())  # amid the election, or after it
        victim = self._living.pop(0)
        victim.kill()
        self._living.append(self._worker(victim.worker_id))

    def _worker(self, worker_id: str | None = None) -> Worker:
        return self._fleet.start(worker_id, handlers="tests.durable.order_handlers", concurrency=10)


async def _published(handlers: Handlers, flows: list[str]) -> None:
    """Publish who publishes these flows, again until it is told that it is done."""
    for flow in flows:
        while True:
            with suppress(PyMongoError, TaskMeshError):
                await handlers.plan.publish(flow)
                break


async def _signalled(mesh: TaskMesh, keys: list[str]) -> list[str]:
    """Signal those orders that are published; return those that are not yet, or of which nobody has answered."""
    left = []
    for key in keys:
        try:
            await mesh.signal("order", key, "go on", 7, signal_id=key)
        except (TaskNotFound, PyMongoError):
            left.append(key)
    return left


def _check_history(marks: list[Mark]) -> None:
    """A step that somebody has got is never done again, and who comes after others comes when all of them are done."""
    got: dict[tuple[str, Any], float] = {}
    for mark in marks:
        if mark.what == "got":
            got.setdefault((mark.key, mark.more["step"]), mark.mono)
    again = [mark for mark in marks if mark.what == "did" and mark.mono > got.get((mark.key, mark.more["step"]), 1e18)]
    assert not again
    joined = [mark for mark in marks if mark.what == "joined"]
    assert {mark.key for mark in joined} == {f"f{n}" for n in range(_FLOWS)}
    for mark in joined:
        assert all(got[f"{mark.key}-{n}", 1] < mark.mono for n in range(MEMBERS))
