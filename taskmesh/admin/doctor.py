"""The doctor: findings about the server, the collection, the fleet and the tasks, each with its remedy.

It only reads. Anything that the server does not let us see is a finding, too, never an error.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import Literal

from taskmesh.admin.queues import COUNTED_TO, read_queues
from taskmesh.admin.stats import read_counts
from taskmesh.admin.store import server_state
from taskmesh.admin.words import tasks, tasks_wait
from taskmesh.client.data_changes import reader_name
from taskmesh.client.registry import Registry
from taskmesh.model.dependency import label
from taskmesh.model.ids import shown
from taskmesh.model.queue import QueueInfo
from taskmesh.model.read_only import ReadOnly
from taskmesh.model.times import duration
from taskmesh.model.worker import WorkerInfo, able_workers, known_names
from taskmesh.store import Store, reach, schema
from taskmesh.store.find import UNFINISHED
from taskmesh.store.registry import loop_names
from taskmesh.store.triggers import data_changes, schedules

Level = Literal["ok", "note", "warning", "error"]

CLOCK_TOLERANCE_S = 2.0
OPLOG_WANTED_S = 24 * 3_600.0
TTL_LAG_S = 600.0
UNCLAIMED_S = 60.0
TRANSACTION_S = 10.0
FLOW_OPEN_S = 600.0
UNREAD_MS = 120_000
GAP_TOLD_S = 24 * 3_600.0
LEASE_LEFT_WANTED = 0.2
CLAIMS_LOST_TOLERATED = 0.5
"""Two healthy workers on one backlog of uneven tasks lose up to 43 % (measured), since a worker with free slots takes others'
tasks."""
CLAIMS_TELLING = 100_000
"""Per hour. Fewer cost the server nothing noticeable."""
LARGE_TASK_BYTES = 4 * 1024 * 1024


class Finding(ReadOnly):
    """One thing that was examined."""

    level: Level
    """`ok`; `note`: good to know; `warning`: will cause trouble one day; `error`: causes trouble now."""
    subject: str
    found: str
    remedy: str | None = None


def _finding(level: Level, subject: str, found: str, remedy: str | None = None) -> Finding:
    return Finding(level=level, subject=subject, found=found, remedy=remedy)


_ok, _note = partial(_finding, "ok"), partial(_finding, "note")
_warning, _error = partial(_finding, "warning"), partial(_finding, "error")


async def examine(store: Store) -> list[Finding]:
    """Examine everything, and return what was found, in a fixed order."""
    workers, unfinished, queues, loops = await asyncio.gather(
        Registry(store).read(), read_counts(store, UNFINISHED), read_queues(store), loop_names(store)
    )
    live = [worker for worker in workers if worker.live]
    parts = (
        _server(store),
        _collection(store),
        _workers(workers, live, unfinished, loops),
        _queues(queues, live),
        _headroom(live),
        _schedules(store, live),
        _needs(store, workers),
        _data_changes(store, live),
        _tasks(store),
        _flows(store),
    )
    # Side by side: some fifty queries, and a person waits.
    return [finding for found in await asyncio.gather(*map(_all_of, parts)) for finding in found]


async def _all_of(part: AsyncIterator[Finding]) -> list[Finding]:
    return [finding async for finding in part]


async def _server(store: Store) -> AsyncIterator[Finding]:
    sent = time.time()
    hello = await store.driver.admin({"hello": 1})
    clock_off_s = hello["localTime"].timestamp() - (sent + time.time()) / 2
    version = f"MongoDB {(await store.driver.admin({'buildInfo': 1}))['version']}"
    if hello["maxWireVersion"] < schema.OLDEST_WIRE_VERSION:
        yield _error("server", version, "upgrade it to 6.0 or newer")
    else:
        yield _ok("server", version)
    if hello.get("msg") == "isdbgrid":
        yield _ok("topology", "a sharded cluster")
    else:
        yield await _replica_set(store, f"replica set {hello['setName']}")
    if abs(clock_off_s) < CLOCK_TOLERANCE_S:
        yield _ok("clock", f"this host and the server differ by {abs(clock_off_s):.2f} s")
    else:
        yield _note(
            "clock",
            f"the server's clock is {clock_off_s:+.1f} s off this host's; leases are not affected, times in logs are",
            "run NTP on both",
        )
    yield await _oplog(store)
    open_too_long = await server_state.long_transactions(store, TRANSACTION_S)
    if open_too_long is None:
        yield _note("transactions", "this user may not see them (inprog)")
    elif open_too_long:
        yield _warning(
            "transactions",
            f"{open_too_long} open for more than {TRANSACTION_S:.0f} s: they block writes to tasks they changed",
            "publish at the end of a transaction, not at its beginning, and keep transactions short",
        )
    else:
        yield _ok("transactions", f"none open for more than {TRANSACTION_S:.0f} s")


async def _replica_set(store: Store, name: str) -> Finding:
    members = await server_state.members(store)
    if members is None:
        return _note("topology", f"{name}; this user may not see its members")
    if down := [member["name"] for member in members if member["health"] != 1]:
        return _error(
            "topology",
            f"{name}: {', '.join(down)} cannot be reached",
            "bring it back, or remove it with rs.remove(): majority writes count it",
        )
    if arbiters := [member["name"] for member in members if member["stateStr"] == "ARBITER"]:
        return _warning(
            "topology",
            f"{name} has an arbiter ({', '.join(arbiters)})",
            "use a member that holds data instead: with one data member down, majority writes and change streams stop",
        )
    if len(members) == 1:
        return _note("topology", f"{name} has a single member: no failover", "use three members in production")
    return _ok("topology", f"{name} with {len(members)} healthy members")


async def _oplog(store: Store) -> Finding:
    window = await server_state.oplog_window_s(store)
    if window is None:
        return _note("oplog", "this user may not see how far back it goes")
    said = f"it covers the last {duration(window * 1_000)}"
    if window >= OPLOG_WANTED_S:
        return _ok("oplog", said)
    # Never worse than a note: an oplog that was not full yet says nothing about its size.
    return _note(
        "oplog",
        f"{said}; a change stream that was away for longer starts again, with a scan (nothing is lost)",
        "if it is full already: db.adminCommand({replSetResizeOplog: 1, size: …, minRetentionHours: 24})",
    )


async def _collection(store: Store) -> AsyncIterator[Finding]:
    database = store.driver.database.name
    if (size := await server_state.size(store)) is not None:
        yield _ok("collection", f"{database}.{store.tasks}: {size['count']} tasks, {size['size'] / 1e6:.1f} MB")
    yield _ok("schema", f"version {schema.SCHEMA_VERSION}")
    indexes = await server_state.index_use(store)
    if indexes is None:
        yield _note("indexes", "this user may not see their use (clusterMonitor)")
    elif not indexes:  # every collection that exists has one
        yield _note(
            "collection",
            f"there is no collection {store.tasks!r} in database {database!r} of {reach.hosts(store)}",
            "if there should be tasks, name another database or collection; else the first worker creates it",
        )
    else:
        ours = {f"taskmesh_{name}": dict(keys) for name, (keys, _) in schema.INDEXES.items()}
        if missing := [name for name, keys in ours.items() if dict(indexes.get(name, {}).get("key", {})) != keys]:
            yield _error(
                "indexes",
                f"missing, or with other keys: {', '.join(missing)}",
                "start anything that connects (it creates them) with a user that may create indexes",
            )
        else:
            used = ", ".join(f"{name.removeprefix('taskmesh_')} {indexes[name]['ops']}" for name in ours)
            yield _ok("indexes", f"all exist; uses since the server started: {used}")
        others = [name for name in indexes if name not in ours and name != "_id_"]
        if idle := [name for name in others if indexes[name]["ops"] == 0]:
            yield _warning(
                "indexes",
                f"not taskmesh's, and never used since the server started: {', '.join(idle)}",
                "drop them unless you know why they are there: each of them slows down every claim",
            )
    if lag := await server_state.past_retention(store, TTL_LAG_S):
        yield _warning(
            "retention",
            f"{_many(lag)} tasks should have been deleted {duration(TTL_LAG_S * 1_000)} ago or more",
            "look at serverStatus().metrics.ttl, and whether ttlMonitorEnabled is on; `taskmesh purge` helps now",
        )
    else:
        yield _ok("retention", "finished tasks are deleted in time")


async def _workers(
    workers: list[WorkerInfo], live: list[WorkerInfo], counts: dict[str, dict[str, int]], loops: Collection[str]
) -> AsyncIterator[Finding]:
    waiting = {name: sum(by_status.values()) for name, by_status in counts.items()}
    if not live:
        unfinished = sum(waiting.values())
        told = f"none is alive; {unfinished} tasks are unfinished"
        yield (_error if unfinished else _note)("workers", told, "taskmesh worker MODULE:MESH")
    else:
        versions = sorted({worker.version for worker in live})
        yield _ok("workers", f"{len(live)} alive, of version {', '.join(versions)}")
        for name, count in sorted(waiting.items()):
            if not count or name in known_names(live):
                continue
            if name in loops:
                yield _warning(
                    "loops",
                    f"{name!r} is a loop or a singleton that no live worker declares: nobody claims it",
                    f"deploy workers that declare it, or remove it: taskmesh delete --where 'name:{name}'",
                )
            else:
                yield _error(
                    "workers",
                    f"no live worker knows {name!r}; {tasks(count)} of this name {'is' if count == 1 else 'are'} unfinished",
                    f"deploy workers with that handler, or cancel them: taskmesh cancel --where 'name:{name}'",
                )
    if gone := [worker.worker_id for worker in workers if worker.state == "gone"]:
        yield _warning(
            "workers",
            f"{len(gone)} disappeared without stopping within the last hour: {', '.join(gone[:3])}",
            "their hosts' logs say why (out of memory?); other workers took their tasks over when the leases ran out",
        )


async def _queues(queues: list[QueueInfo], live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    for queue in queues:
        if queue.paused and queue.waiting:
            yield _warning(
                "queues",
                f"{queue.queue!r} is {queue.shut_because}, and {tasks_wait(queue.waiting, queue.more_waiting)} in it",
                f"taskmesh resume {queue.queue}",
            )
        if queue.dead_letters:
            more = " or more" if queue.dead_letters >= COUNTED_TO else ""
            yield _note(
                "dead letters",
                f"{queue.dead_letters}{more} in {queue.queue!r}",
                f"taskmesh errors tells why; taskmesh redrive {queue.queue} sends them back to their queues",
            )
        for group, pause in queue.paused_groups.items():
            if queue.waiting:
                yield _warning(
                    "queues",
                    f"group {group!r} of {queue.queue!r} is {pause.sentence}",
                    f"taskmesh resume {queue.queue} --group {shlex.quote(group)}",
                )
        if live and queue.waiting and not any(worker.takes_from(queue.queue) for worker in live):
            yield _error(
                "queues",
                f"{tasks_wait(queue.waiting, queue.more_waiting)} in {queue.queue!r}, from which no live worker takes tasks",
                f"taskmesh worker MODULE:MESH --queues {queue.queue}",
            )


async def _needs(store: Store, workers: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """Tasks that live workers run, but none with the labels that they need."""
    for queue, name, needs, count in await server_state.needs_of_waiting(store) or ():
        if able_workers(workers, name, queue) and not able_workers(workers, name, queue, needs=needs):
            labels = [f"--label {shlex.quote(need)}" for need in needs]
            yield _error(
                "needs",
                f"{tasks_wait(count)} ({name!r} in {queue!r}) for a worker with {', '.join(needs)}, which no live one has",
                f"taskmesh worker MODULE:MESH {' '.join(labels)}",
            )


async def _headroom(live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """How close the live workers came to losing what they run, within the last hour."""
    lefts = sorted((left.share, left.name, worker.worker_id) for worker in live for left in worker.lease_left)
    if lefts and lefts[0][0] < LEASE_LEFT_WANTED:
        share, name, worker_id = lefts[0]
        yield _warning(
            "headroom",
            f"a lease of {name!r} on {worker_id} was renewed when {share:.0%} of it was left; at 0 the task runs twice",
            "set a longer worker_timeout_ms, and see what delayed its pings: the host, or the network to the database",
        )
    elif lefts:
        yield _ok("headroom", f"every lease was renewed with {lefts[0][0]:.0%} of it left, or more")
    for worker in live:
        if worker.stood_still_ms:
            yield _warning(
                "event loop",
                f"the event loop of {worker.worker_id} was blocked for {duration(worker.stood_still_ms)} within the last hour",
                "its log names the handler that blocked it: make that handler a plain function (it runs in a thread)",
            )
        if abs(worker.clock_off_ms) > CLOCK_TOLERANCE_S * 1000:
            yield _note(
                "worker clocks",
                f"the clock of {worker.host} ({worker.worker_id}) is {worker.clock_off_ms / 1000:+.1f} s off the server's; "
                "leases are not affected, times in its log are",
                "run NTP there",
            )
        lost = worker.claims_lost_share
        if lost is not None and worker.claims_tried >= CLAIMS_TELLING and lost > CLAIMS_LOST_TOLERATED:
            yield _note(
                "claims",
                f"{lost:.0%} of the {worker.claims_tried} claims of {worker.worker_id} within the last hour won nothing: "
                "other workers had claimed the tasks already",
                "no task is delayed, but each such claim costs the server work: if it is busy, run the same number of slots "
                "in fewer workers",
            )


async def _schedules(store: Store, live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    known = known_names(live)
    for schedule in await schedules.read_all(store):
        name = schedule.get("name")
        if live and name not in known and not schedule.get("paused"):
            yield _warning(
                "schedules",
                f"{schedule['_id']!r} publishes {name!r}, which no live worker knows",
                f"deploy workers with that handler, or: taskmesh pause-schedule {schedule['_id']}",
            )


async def _data_changes(store: Store, live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """Whether the changes of data that become tasks are read. Readers that no live worker declares are found among the loops."""
    known = known_names(live)
    for place in await data_changes.read_all(store):
        reader, namespace = reader_name(place["task"]), place["namespace"]
        if reader not in known:
            continue
        changes, trouble = f"changes of {namespace} for {place['task']!r}", place.get("trouble")
        age = duration(place.get("age_ms") or 0.0)
        if trouble is not None and trouble["lost"]:
            yield _error(
                "data changes",
                f"{changes} are lost: the oplog no longer has those after the last one that was read, {age} ago",
                "check what changed since then, and deploy on_lost='skip', which continues with changes from now on",
            )
        elif trouble is not None:
            yield _error(
                "data changes",
                f"{changes} have not been read for {age}: {trouble['reason']}",
                f"correct the pipeline, or the data that it fails on: taskmesh show {reader} fleet",
            )
        elif (place.get("age_ms") or 0.0) > UNREAD_MS:
            yield _error(
                "data changes",
                f"{changes} have not been read for {age}; they are lost when they leave the oplog",
                f"start a worker that takes from the queue 'changes': taskmesh explain {reader} fleet",
            )
        else:
            yield _ok("data changes", f"{changes} are read")
        for gap in place.get("gaps", ()):
            if (place["now"] - gap["to"]).total_seconds() < GAP_TOLD_S:
                yield _warning(
                    "data changes",
                    f"{changes} between {gap['from']:%F %T} and {gap['to']:%F %T} UTC are lost, and made no tasks",
                    "check what changed then; use a larger oplog, or do not stop all workers for that long",
                )


async def _tasks(store: Store) -> AsyncIterator[Finding]:
    late, short, large, stranded, crossed, strangers = await asyncio.gather(
        server_state.unclaimed_leases(store, UNCLAIMED_S),
        server_state.short_leases(store),
        server_state.large_tasks(store, LARGE_TASK_BYTES),
        server_state.stranded(store, UNCLAIMED_S),
        server_state.waits_for_its_own_line(store),
        server_state.never_accepted(store),
    )
    if strangers:
        yield _warning(
            "inserted",
            f"no worker ever accepts {', '.join(map(shown, strangers))}: not inserted as taskmesh's protocol says",
            "status must be 'INIT', and _id must be name:key of the fields name and key: delete it, and insert it again",
        )
    if late:
        yield _warning(
            "leases",
            f"{_many(late)} tasks lost their worker more than {UNCLAIMED_S:.0f} s ago, and nobody has taken them over",
            "is a worker alive that knows them, with free slots? `taskmesh explain NAME KEY` tells for one",
        )
    if stranded:
        yield _warning(
            "dependencies",
            f"{', '.join(stranded)} wait for tasks that are all finished, not all of them as SUCCESS",
            "with on_dependency_failure='wait': retry what failed, or publish again what was deleted and retry these",
        )
    if crossed:
        head, behind = map(label, crossed)
        yield _error(
            "sequences",
            f"{head} waits for {behind}, which is behind it in its own sequence: neither ever runs",
            f"cancel {head}, and retry it when {behind} is done",
        )
    if short:
        yield _warning(
            "leases",
            f"worker_timeout_ms is less than two pings for {', '.join(short[:5])}: one late ping loses a task",
            "set it to three times ping_interval_ms or more",
        )
    if large:
        yield _warning(
            "tasks",
            f"{len(large)} or more are over 4 MB; {large[0]['_id']!r} has {large[0]['bytes'] / 1e6:.1f} MB of at most 16",
            "store large values elsewhere, and put a reference into the params",
        )


async def _flows(store: Store) -> AsyncIterator[Finding]:
    if left_open := await server_state.open_flows(store, FLOW_OPEN_S):
        yield _warning(
            "flows",
            f"{', '.join(map(repr, left_open))}: publishing began more than {duration(FLOW_OPEN_S * 1_000)} ago and was not "
            "completed: none of its tasks runs",
            "publish it again: the same code completes it; or give it up: taskmesh flow KEY --cancel",
        )


def _many(count: int) -> str:
    return "1000 or more" if count >= 1_000 else str(count)
