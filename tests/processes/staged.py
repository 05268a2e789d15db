"""Moments that a test needs a worker to be in: put into workers with a broken part and into whole ones alike.

They change when something happens, or tell of it, and never what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from taskmesh.consumer.claimer import Claimed, Claimer
from taskmesh.consumer.run import finisher
from taskmesh.consumer.scanner import SCAN_EVERY_S, Scanner
from taskmesh.store import Store
from taskmesh.store.relations import dependencies
from tests.processes.sabotage import replace
from tests.processes.signs import Signs

_PARTS: dict[str, Callable[[str, Signs], None]] = {}


def parts(worker_id: str, directory: Path) -> dict[str, Callable[[], None]]:
    """Return the parts for this worker, by name. Signs are given and awaited in `directory`."""
    signs = Signs(directory)
    return {name: lambda part=part: part(worker_id, signs) for name, part in _PARTS.items()}  # type: ignore[misc]


def part(function: Callable[[str, Signs], None]) -> Callable[[str, Signs], None]:
    """Enter a part under its function's name."""
    _PARTS[function.__name__] = function
    return function


@part
def waits_before_claims(worker_id: str, signs: Signs) -> None:
    """Before it sends a claim it waits for "… may claim": what it wants may change meanwhile. It tells when it has tried."""
    claim_set = Claimer._claim_set

    async def wait_and_claim(self: Claimer, *arguments: Any) -> Claimed:
        signs.give(f"{worker_id} wants to claim")
        await signs.wait(f"{worker_id} may claim")
        claimed = await claim_set(self, *arguments)
        signs.give(f"{worker_id} has tried" if claimed.answered else f"{worker_id} had no answer")
        return claimed

    replace(Claimer, "_claim_set", wait_and_claim)


@part
def claims_again(worker_id: str, signs: Signs) -> None:
    """It claims what it had before once more, when told to: a candidate that is long out of date."""
    claim_set = Claimer._claim_set

    async def claim_and_again(self: Claimer, *arguments: Any) -> Claimed:
        claimed = await claim_set(self, *arguments)
        await signs.wait(f"{worker_id} may claim again")
        await claim_set(self, *arguments)
        signs.give(f"{worker_id} has tried again")
        return claimed

    replace(Claimer, "_claim_set", claim_and_again)


@part
def tells_of_lost_outcomes(worker_id: str, signs: Signs) -> None:
    """It tells when the write of an outcome was not answered."""
    finish: Any = vars(finisher)["finish"]

    async def finish_and_tell(*arguments: Any, **settings: Any) -> int:
        try:
            return int(await finish(*arguments, **settings))
        except PyMongoError:
            signs.give(f"{worker_id} had no answer")
            raise

    replace(finisher, "finish", finish_and_tell)


@part
def opens_when_told(worker_id: str, signs: Signs) -> None:
    """It asks what dependents still wait for when it "… may ask", and opens their gates when it "… may open": on a primary."""
    ask, open_gate = vars(dependencies)["_ask"], vars(dependencies)["open_gate"]

    async def wait_and_ask(*arguments: Any) -> Any:
        signs.give(f"{worker_id} wants to ask")
        await signs.wait(f"{worker_id} may ask")
        return await ask(*arguments)

    async def wait_and_open(store: Store, gate: Any, ids: Any) -> Any:
        signs.give(f"{worker_id} has asked")
        await signs.wait(f"{worker_id} may open")
        while True:
            try:
                await store.driver.command({"ping": 1})
                return await open_gate(store, gate, ids)
            except PyMongoError:
                await asyncio.sleep(0.1)

    replace(dependencies, "_ask", wait_and_ask)
    replace(dependencies, "open_gate", wait_and_open)


@part
def scans_when_told(_: str, __: Signs) -> None:
    """It has no safety net: it scans when something in it orders that, and for ever else waits for the stream."""

    async def run(self: Scanner) -> None:
        while True:
            await self._candidates.scan_wanted.wait()
            self._candidates.scan_wanted.clear()
            try:
                await self.run_once()
            except PyMongoError:
                self._candidates.scan_wanted.set()
                await asyncio.sleep(SCAN_EVERY_S)

    replace(Scanner, "run", run)
