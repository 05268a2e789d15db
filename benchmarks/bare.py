"""What members of a crew do with the driver alone: the measure of what the engine costs.

The same documents, in a collection with the indexes that taskmesh creates, written with majority. The rule is the least
that can be called one: a task that is INIT is claimed once; who holds it may finish it. No engine: the ids are known
beforehand, nothing is scanned, listened for, renewed or derived.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.write_concern import WriteConcern

from benchmarks.line import Line, Role, Setting

Tasks = AsyncCollection[dict[str, Any]]
_FIELDS = {"name": 1, "key": 1, "queue": 1, "params": 1}


def _claim(running_id: str) -> list[dict[str, Any]]:
    entry = {
        "running_id": {"$literal": running_id},
        "worker_id": "bare",
        "state": "RUNNING",
        "start_time": "$$NOW",
        "ping_expire_time": {"$add": ["$$NOW", 60_000]},
    }
    return [
        {
            "$set": {
                "task_state.worker_states": {"$concatArrays": ["$task_state.worker_states", [entry]]},
                "status": "RUNNING",
                "next_claim_time": {"$add": ["$$NOW", 60_000]},
            }
        }
    ]


def _success(running_id: str) -> list[dict[str, Any]]:
    mine = {"$eq": ["$$this.running_id", {"$literal": running_id}]}
    ended = {"$mergeObjects": ["$$this", {"state": "SUCCESS", "success_time": "$$NOW", "returns": None}]}
    entries = {"$map": {"input": "$task_state.worker_states", "in": {"$cond": [mine, ended, "$$this"]}}}
    return [{"$set": {"task_state.worker_states": entries, "status": "SUCCESS", "next_claim_time": "$$REMOVE"}}]


async def _batch(tasks: Tasks, ids: list[str], *, reads: bool) -> int:
    """Claim, read (unless that is left out) and finish one set."""
    running_id = secrets.token_hex(8)
    await tasks.update_many({"_id": {"$in": ids}, "status": "INIT"}, _claim(running_id))
    mine = ids
    if reads:
        held = {"_id": {"$in": ids}, "task_state.worker_states.running_id": running_id}
        found = await tasks.find(held, _FIELDS, batch_size=10_000).to_list(None)
        mine = [task["_id"] for task in found]
    entry = {"$elemMatch": {"running_id": running_id, "state": "RUNNING"}}
    done = await tasks.update_many(
        {"_id": {"$in": mine}, "status": "RUNNING", "task_state.worker_states": entry}, _success(running_id)
    )
    return int(done.modified_count)


async def _one(tasks: Tasks, id_: str) -> int:
    """Claim and finish one task, in the way in which it is usually done."""
    running_id = secrets.token_hex(8)
    found = await _claim_one(tasks, id_, running_id)
    return 0 if found is None else await _finish_one(tasks, id_, running_id)


async def _claim_one(tasks: Tasks, id_: str, running_id: str) -> dict[str, Any] | None:
    now = datetime.now(UTC)
    until = now + timedelta(minutes=1)
    entry = {"running_id": running_id, "worker_id": "bare", "state": "RUNNING", "start_time": now}
    change = {
        "$push": {"task_state.worker_states": entry | {"ping_expire_time": until}},
        "$set": {"status": "RUNNING", "next_claim_time": until},
    }
    return await tasks.find_one_and_update({"_id": id_, "status": "INIT"}, change, _FIELDS)


async def _finish_one(tasks: Tasks, id_: str, running_id: str) -> int:
    mine = {"$elemMatch": {"running_id": running_id, "state": "RUNNING"}}
    ended = {"state": "SUCCESS", "success_time": datetime.now(UTC), "returns": None}
    change = {
        "$set": {f"task_state.worker_states.$.{field}": value for field, value in ended.items()}
        | {"status": "SUCCESS"},
        "$unset": {"next_claim_time": True},
    }
    done = await tasks.update_one({"_id": id_, "status": "RUNNING", "task_state.worker_states": mine}, change)
    return int(done.modified_count)


async def _loop(
    line: Line, setting: Setting, in_flight: int, pieces: list[Any], do: Callable[[Tasks, Any], Awaitable[int]]
) -> None:
    """Do `in_flight` pieces at a time, from `go` on."""
    done = 0
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(setting["uri"])
    async with client:
        tasks = client[setting["database"]].get_collection("tasks", write_concern=WriteConcern("majority"))
        await tasks.find_one({"_id": "warm"})
        line.say(ready=True)
        await line.go.wait()
        sampling = asyncio.create_task(line.sample(lambda: done))
        left = iter(pieces)

        async def work() -> None:
            nonlocal done
            for piece in left:
                made = await do(tasks, piece)  # not `done += await …`: that would read `done` before it waits
                done += made

        await asyncio.gather(*(work() for _ in range(in_flight)))
        line.say(t=time.monotonic(), n=done)
        sampling.cancel()
        await line.end.wait()
    line.say(report={"finished": done})


async def bare_set(line: Line, setting: Setting) -> None:
    """Set-based claim, find, set-based SUCCESS: `in_flight` sets of `batch` at a time."""
    ids = [f"noop:{key}" for key in range(setting["first"], setting["count"], setting["step"])]
    batches = [list(batch) for batch in _batched(ids, setting["batch"])]
    await _loop(line, setting, setting["in_flight"], batches, partial(_batch, reads=setting.get("reads", True)))


async def bare_single(line: Line, setting: Setting) -> None:
    """`find_one_and_update`, then `update_one`, `in_flight` tasks at a time."""
    ids = [f"noop:{key}" for key in range(setting["first"], setting["count"], setting["step"])]
    await _loop(line, setting, setting["in_flight"], ids, _one)


def _batched(ids: list[str], size: int) -> list[list[str]]:
    left = iter(ids)
    return list(iter(lambda: list(itertools.islice(left, size)), []))


# --- latency ---


async def bare_floor_worker(line: Line, setting: Setting) -> None:
    """Hear of an insert by a change stream, claim it by one update, note the delay, finish it by another."""
    delays_ms: list[float] = []
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(setting["uri"])
    async with client:
        tasks = client[setting["database"]].get_collection("tasks", write_concern=WriteConcern("majority"))
        pipeline: list[dict[str, Any]] = [{"$match": {"operationType": "insert"}}, {"$project": {"documentKey": 1}}]
        async with await tasks.watch(pipeline, max_await_time_ms=100) as stream:
            line.say(ready=True)
            while not line.end.is_set():
                event = await stream.try_next()
                if event is None:
                    continue
                running_id = secrets.token_hex(8)
                task = await _claim_one(tasks, event["documentKey"]["_id"], running_id)
                if task is not None:
                    delays_ms.append((time.monotonic() - task["params"]["sent"]) * 1000)
                    await _finish_one(tasks, task["_id"], running_id)
    line.say(report={"delays_ms": delays_ms})


async def bare_floor_publisher(line: Line, setting: Setting) -> None:
    """Insert a task, and hear of its SUCCESS by a change stream; one after the other."""
    results_ms: list[float] = []
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(setting["uri"])
    async with client:
        tasks = client[setting["database"]].get_collection("tasks", write_concern=WriteConcern("majority"))
        pipeline: list[dict[str, Any]] = [
            {"$match": {"updateDescription.updatedFields.status": "SUCCESS"}},
            {"$project": {"documentKey": 1}},
        ]
        template = setting["template"]
        async with await tasks.watch(pipeline, max_await_time_ms=500) as stream:
            line.say(ready=True)
            await line.go.wait()
            for tick in range(setting["ticks"] + 1):
                await asyncio.sleep(setting["tick_s"])
                id_ = f"stamp:{setting['prefix']}-{tick}"
                sent = time.monotonic()
                document = template | {"_id": id_, "params": {"sent": sent}, "status": "INIT"}
                await tasks.insert_one(document)
                while True:
                    event = await stream.try_next()
                    if event is not None and event["documentKey"]["_id"] == id_:
                        break
                if tick:  # the first warms up
                    results_ms.append((time.monotonic() - sent) * 1000)
            line.say(t=time.monotonic(), n=setting["ticks"])
            await line.end.wait()
    line.say(report={"results_ms": results_ms})


ROLES: dict[str, Role] = {
    "bare_set": bare_set,
    "bare_single": bare_single,
    "bare_floor_worker": bare_floor_worker,
    "bare_floor_publisher": bare_floor_publisher,
}
