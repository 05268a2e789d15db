"""Nothing that could run is left lying: random work, all verbs, limits, pauses, and workers that come and go.

`explain` is the judge: what it calls claimable, though nothing runs, has to start. What is waited for is one thing only: that
the fleet finds it. Everything that only runs out in time (a slot that its worker has lost sight of, a timer that nobody hastens)
takes longer than is allowed here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from taskmesh import Consumer, Next, Snooze, Status, Task, TaskMesh, TaskMeshError, TaskOption, current_task
from taskmesh.admin.explain import Explanation
from tests.waiting import Slowness, eventually, slowness_of_the_machine

_ALLOWED_S = 3.5
_KINDS = ("plain", "plain", "fails", "fails once", "snoozes", "steps", "waits", "starts others", "moves on")
_VERBS = ("cancel", "delete", "retry", "retry fresh", "run again", "signal", "set option")
_CONTROLS = ("pause", "resume", "pause group", "resume group", "limit", "another worker")
_OPENED_BY_WORKERS = ("being found", "every task that it waits for is finished", "it is at the head", "(SUCCESS)")
"""What the reasons of shut gates say that the fleet has to open by itself."""


class Fleet:
    """A few consumers, and tasks of one name that do what their `kind` says."""

    def __init__(self, mesh: TaskMesh, random: Random, slowness: Slowness) -> None:
        self._mesh = mesh
        self._random = random
        self._slowness = slowness
        self._consumers: dict[Consumer, asyncio.Task[None]] = {}
        self._leaving: list[asyncio.Task[None]] = []
        self._keys: list[str] = []
        self._published = 0
        self._did: list[tuple[str, ...]] = []
        snoozed: set[str] = set()
        option = TaskOption(max_unexpected_retries=1, unexpected_retry_delay_ms=random.choice([0, 200]))

        @mesh.task(option=option)
        async def work(kind: str, lasts_s: float) -> Next | None:
            task = current_task()
            await asyncio.sleep(lasts_s)
            if kind == "fails" or (kind == "fails once" and task.attempt == 1):
                raise ValueError(kind)
            if kind == "snoozes" and task.key not in snoozed:
                snoozed.add(task.key)
                raise Snooze(delay_ms=100)
            if kind == "steps":
                await task.step("one", asyncio.sleep, 0)
                await task.sleep("a nap", seconds=1.1)
            if kind == "waits":
                await task.wait_for("go", timeout_ms=1_000)
            if kind == "starts others":
                children = [
                    await task.start(work, f"{task.key}-{n}", kind="fails once", lasts_s=0.01) for n in range(2)
                ]
                await task.results(children)
            if kind == "moves on":
                return Next(queue="other", params={"kind": "plain", "lasts_s": lasts_s})
            return None

        self._work = work

    # --- what happens ---

    def begin(self) -> None:
        """Start another worker."""
        consumer = self._mesh.consumer(concurrency=self._random.choice([1, 2, 8]))
        self._consumers[consumer] = asyncio.create_task(consumer.run())

    async def replace(self) -> None:
        """Stop the oldest worker, gracefully or not, after another has begun."""
        oldest, running = next(iter(self._consumers.items()))
        self.begin()
        del self._consumers[oldest]
        oldest.begin_stop(grace_ms=self._random.choice([0, 50, 2_000]))
        self._leaving.append(running)

    async def end(self) -> None:
        """Stop all of them."""
        for consumer in self._consumers:
            consumer.begin_stop(grace_ms=0)
        await asyncio.gather(*self._consumers.values(), *self._leaving)

    async def round(self) -> None:
        """Let much happen, open what is paused, and wait until nothing is left that could run."""
        choose = self._random.choice
        self._keys, self._did = [], []
        limits: dict[str, Any] = {
            "running": choose([None, 1, 3]),
            "rate": choose([None, None, 50]),
            "group_running": choose([None, 1, 2]),
            "group_rate": choose([None, None, 30]),
        }
        self._did.append(("limits", str(limits)))
        await self._mesh.set_limit("default", **limits)
        for _ in range(self._random.randint(5, 20)):
            with suppress(TaskMeshError):  # there is no such task any more, or it is finished, or at work
                await self._do()
            await asyncio.sleep(self._random.random() * 0.08)
        await self._mesh.resume("default")
        await self._mesh.resume("default", group="g1")
        await self._rest()

    async def _do(self) -> None:
        choice = self._random.random()
        if choice < 0.5 or not self._keys:
            await self._publish()
        elif choice < 0.8:
            await self._change(self._random.choice(_VERBS), self._random.choice(self._keys))
        else:
            await self._control(self._random.choice(_CONTROLS))

    async def _publish(self) -> None:
        choose = self._random.choice
        self._published += 1
        key = f"k{self._published}"
        how: dict[str, Any] = {"priority": choose([0, 0, 5])}
        if group := choose([None, "g1", "g2"]):
            how["group"] = group
        if sequence := choose([None, None, None, "s1", "s2"]):
            how["sequence_key"] = sequence
        if delay := choose([None, None, None, 50, 700]):
            how["delay_ms"] = delay
        if self._random.random() < 0.25:
            params = {"kind": "plain", "lasts_s": 0.01}
            self._did.append(("publish many", key, str(how)))
            await self._work.configure(**how).publish_many({f"{key}.{n}": params for n in range(5)})
            self._keys += [f"{key}.{n}" for n in range(5)]
            return
        if self._keys and self._random.random() < 0.25:
            how["after"] = [("work", choose(self._keys))]
            how["on_dependency_failure"] = choose(["fail", "run"])
        kind, lasts_s = choose(_KINDS), choose([0.0, 0.01, 0.05, 0.3])
        self._did.append(("publish", key, kind, str(how)))
        await self._work.configure(**how).publish(key, kind=kind, lasts_s=lasts_s)
        self._keys.append(key)

    async def _change(self, verb: str, key: str) -> None:
        self._did.append((verb, key))
        if verb == "cancel":
            await self._mesh.cancel("work", key)
        elif verb == "delete":
            await self._mesh.delete("work", key)
        elif verb == "retry":
            await self._mesh.retry("work", key)
        elif verb == "retry fresh":
            await self._mesh.retry("work", key, fresh=True)
        elif verb == "run again":
            await self._work.configure(run_again=True).publish(key, kind="plain", lasts_s=0.01)
        elif verb == "signal":
            await self._mesh.signal("work", key, "go", 1)
        else:
            await self._mesh.set_option("work", key, priority=self._random.choice([-1, 9]))

    async def _control(self, what: str) -> None:
        self._did.append((what,))
        if what == "pause":
            await self._mesh.pause("default")
        elif what == "resume":
            await self._mesh.resume("default")
        elif what == "pause group":
            await self._mesh.pause("default", group="g1")
        elif what == "resume group":
            await self._mesh.resume("default", group="g1")
        elif what == "limit":
            await self._mesh.set_limit("default", running=self._random.choice([None, 1, 2]))
        else:
            await self.replace()

    # --- what has to follow ---

    async def _rest(self) -> None:
        """Wait until nothing runs and nothing could; whatever could, and does not begin for too long, is an error."""
        since: dict[tuple[str, int], float] = {}

        async def is_at_rest() -> bool:
            nonlocal since
            unfinished = [
                task async for task in self._mesh.find("work") if task.status in (Status.INIT, Status.RUNNING)
            ]
            now = time.monotonic()
            if runs := any(task.status is Status.RUNNING for task in unfinished):
                since = {}
            waiting = [(task, why) for task in unfinished if (why := await self._could_run(task)) is not None]
            attempts = {(task.key, len(task.task_state.worker_states)): why for task, why in waiting}
            since = {attempt: since.get(attempt, now) for attempt in attempts if not runs}
            allowed = _ALLOWED_S + self._slowness.allows.total_seconds()
            late = [(key, why) for key, why in attempts.items() if now - since.get(key, now) > allowed]
            assert not late, f"left lying for {allowed:.1f} s: {late}\nafter: {self._did}"
            later = [task for task in unfinished if task.next_claim_time is not None]
            return not (runs or waiting or later)

        await eventually(is_at_rest, 120, what="nothing runs, and nothing could")

    async def _could_run(self, task: Task) -> str | None:
        """Why a worker should start it, or the fleet should open its gate, now; None if it has to wait."""
        if task.status is not Status.INIT:
            return None
        explanations: list[Explanation] = []
        with suppress(TaskMeshError):  # deleted meanwhile
            explanations = await self._mesh.explain("work", task.key)
        for explanation in explanations:
            shut = [gate for gate in explanation.gates if not gate.open]
            if all(
                gate.name in ("sequence", "dependencies") and any(part in gate.reason for part in _OPENED_BY_WORKERS)
                for gate in shut
            ):
                return "; ".join(gate.reason for gate in shut) or "claimable"
        return None


@asynccontextmanager
async def a_fleet(mesh: TaskMesh, seed: int) -> AsyncIterator[Fleet]:
    random = Random(seed)
    async with slowness_of_the_machine(mesh) as slowness:
        fleet = Fleet(mesh, random, slowness)
        for _ in range(random.choice([1, 2, 3])):
            fleet.begin()
        try:
            yield fleet
        finally:
            await fleet.end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_what_could_run_starts_soon(mesh: TaskMesh, seed: int) -> None:
    async with a_fleet(mesh, seed) as fleet:
        for _ in range(8):
            await fleet.round()
