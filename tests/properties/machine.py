"""The state machine: many worlds at once, each led through random operations under a seed, and what to do at a difference.

`SEED=` and `OPERATIONS=` in the environment choose the run; without, it is always the same one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh.store import Store, rules
from taskmesh.store.pipeline.prepared import Build, prepared
from tests.properties.chance import Chance, labels
from tests.properties.world import Difference, Operation, World

OPERATIONS_OF_A_LIFE = 400
"""Then a world begins again with an empty collection, so that a counterexample stays short."""
_MOMENTS_KEPT = 200
"""Pipelines that are kept built: those of the present moments of some worlds."""


@asynccontextmanager
async def worlds(uri: str, database: str, count: int) -> AsyncIterator[list[World]]:
    """Create so many worlds."""
    client: AsyncMongoClient[dict[str, object]] = AsyncMongoClient(uri, tz_aware=True)
    sync_database = Store(client, database).driver.sync_database()
    try:
        made = [World.create(client, database, sync_database, number) for number in range(count)]
        yield list(await asyncio.gather(*made))
    finally:
        sync_database.client.close()
        await client.close()


@contextmanager
def _rule_built_once_a_moment() -> Iterator[None]:
    """Build pipelines once for each moment, and not for each command: that was a third of what a run computes.

    As Python objects, which mutants look into. The rule does not change while worlds are led: mutants come before.
    """
    built: dict[Hashable, Any] = {}

    def once(build: Build, now: rules.Expression, *arguments: Hashable) -> Any:
        key = (build, now, arguments)
        if key not in built:
            if len(built) > _MOMENTS_KEPT:
                built.clear()
            built[key] = prepared(build, now, *arguments)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in tuple(sys.modules.values()):
            if getattr(module, "prepared", None) is prepared and module is not sys.modules[__name__]:
                patch.setattr(module, "prepared", once)
        yield


async def drive(worlds: Sequence[World], seed: str, operations: int, *, explained: bool = True) -> Counter[str]:
    """Lead the worlds through so many operations together; return how often each kind had an effect.

    Raises:
        Difference: if `explained`, with the shortest sequence of operations found that leads to one.
    """
    each = -(-operations // len(worlds))
    over = asyncio.Event()
    runs = (_drive(world, f"{seed}/{n}", each, over, explained=explained) for n, world in enumerate(worlds))
    # To the end of what is under way: a cancelled transaction would stay open, and in everybody's way.
    with _rule_built_once_a_moment():
        results = await asyncio.gather(*runs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return sum((result for result in results if not isinstance(result, BaseException)), Counter[str]())


async def _drive(world: World, seed: str, operations: int, over: asyncio.Event, *, explained: bool) -> Counter[str]:
    succeeded: Counter[str] = Counter()
    done = 0
    while done < operations and not over.is_set():
        await world.begin_again()
        chance = Chance(f"{seed}/{done}")
        while done < operations and not over.is_set() and len(world.operations) < OPERATIONS_OF_A_LIFE:
            drawn = chance.operations(world)
            if not drawn:
                continue
            done += len(drawn)
            try:
                effects = await world.apply(*drawn)
            except Difference as difference:
                over.set()
                if explained:
                    await _explain(world, seed, difference)
                raise
            for operation, had_effect in zip(drawn, effects, strict=True):
                succeeded.update(labels(operation) if had_effect else ())
    return succeeded


async def _explain(world: World, seed: str, difference: Difference) -> None:
    """Shorten the way to a difference, and raise it with that."""
    shortest, last = await shortened(world, list(world.operations), difference)
    steps = "\n".join(f"  {operation}" for operation in shortest)
    raise Difference(f"{last}\nafter these operations (seed {seed}):\n{steps}") from None


_SHORTENED_WITHIN_S = 120.0
"""Then what is left is told, however long."""


async def shortened(
    world: World, operations: list[Operation], difference: Difference
) -> tuple[list[Operation], Difference]:
    """Leave out what is not needed to come to a difference; return what is left, and where it leads."""
    size = max(1, len(operations) // 2)
    end = time.monotonic() + _SHORTENED_WITHIN_S
    while size:
        start = 0
        while start < len(operations):
            if time.monotonic() >= end:
                return operations, difference
            candidate = operations[:start] + operations[start + size :]
            found = await _replayed(world, candidate)
            if found is None:
                start += size
            else:
                operations, difference = candidate[: len(world.operations)], found
        size //= 2
    return operations, difference


async def _replayed(world: World, operations: Sequence[Operation]) -> Difference | None:
    await world.begin_again()
    world.thorough = True
    try:
        for operation in operations:
            await world.apply(operation)
    except Difference as difference:
        return difference
    finally:
        world.thorough = False
    return None
