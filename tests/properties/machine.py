"""The state machine: many worlds at once, each led through random operations under a seed, and what to do at a difference.

`SEED=` and `OPERATIONS=` in the environment choose the run; without, it is always the same one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pymongo import AsyncMongoClient

from taskmesh.store import Store
from tests.properties.chance import Chance, labels
from tests.properties.world import Difference, Operation, World

OPERATIONS_OF_A_LIFE = 60
"""Then a world begins again with an empty collection, so that a counterexample stays short."""


@asynccontextmanager
async def worlds(uri: str, database: str, count: int) -> AsyncIterator[list[World]]:
    """Create worlds with one, two and three tasks."""
    client: AsyncMongoClient[dict[str, object]] = AsyncMongoClient(uri, tz_aware=True)
    sync_database, ours = Store(client, database).driver.sync_database()
    try:
        made = [World.create(client, database, sync_database, n, tasks=1 + n % 3) for n in range(count)]
        yield list(await asyncio.gather(*made))
    finally:
        if ours:
            sync_database.client.close()
        await client.close()


async def drive(worlds: Sequence[World], seed: str, operations: int) -> Counter[str]:
    """Lead the worlds through so many operations together; return how often each kind had an effect.

    Raises:
        Difference: with the shortest sequence of operations found that leads to one.
    """
    each = -(-operations // len(worlds))
    runs = [asyncio.create_task(_drive(world, f"{seed}/{n}", each)) for n, world in enumerate(worlds)]
    try:
        return sum(await asyncio.gather(*runs), Counter[str]())
    finally:
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)


async def _drive(world: World, seed: str, operations: int) -> Counter[str]:
    succeeded: Counter[str] = Counter()
    for done in range(operations):
        if done % OPERATIONS_OF_A_LIFE == 0:
            await world.begin_again()
            chance = Chance(f"{seed}/{done}")
        operation = chance.operation(world)
        try:
            if await world.apply(operation):
                succeeded.update(labels(operation))
        except Difference as difference:
            await _explain(world, seed, difference)
    return succeeded


async def _explain(world: World, seed: str, difference: Difference) -> None:
    """Shorten the way to a difference, and raise it with that."""
    shortest, last = await shortened(world, list(world.operations), difference)
    steps = "\n".join(f"  {operation}" for operation in shortest)
    raise Difference(f"{last}\nafter these operations (seed {seed}):\n{steps}") from None


async def shortened(
    world: World, operations: list[Operation], difference: Difference
) -> tuple[list[Operation], Difference]:
    """Leave out what is not needed to come to a difference; return what is left, and where it leads."""
    size = max(1, len(operations) // 2)
    while size:
        start = 0
        while start < len(operations):
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
