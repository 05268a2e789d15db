"""Is anything wrong with this mesh? Findings about the server, the collection, the fleet and the tasks, each with its remedy.

Reads only. What the server does not let us see is a finding too, never an error.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict

from taskmesh.admin.queues import COUNTED_TO, read_queues
from taskmesh.admin.stats import read_counts
from taskmesh.admin.store import server_state
from taskmesh.client.data_changes import reader_name
from taskmesh.client.registry import Registry
from taskmesh.model.dependency import label
from taskmesh.model.durations import duration
from taskmesh.model.ids import shown
from taskmesh.model.queue import QueueInfo
from taskmesh.model.worker import WorkerInfo, able_workers, known_names
from taskmesh.store import Store, data_changes, reach, schedules, schema
from taskmesh.store.find import UNFINISHED
from taskmesh.store.registry import loop_names

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
"""Two healthy workers on one backlog of uneven tasks lose up to 43 % (measured): whoever has room takes others' tasks."""
CLAIMS_TELLING = 100_000
"""In an hour. Fewer cost the server nothing that anybody would notice."""
LARGE_TASK_BYTES = 4 * 1024 * 1024


class Finding(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)

    level: Level
    """`ok`; `note`: good to know; `warning`: will hurt one day; `error`: hurts now."""
    subject: str
    found: str
    remedy: str | None = None


async def examine(store: Store) -> list[Finding]:
    """Look at everything, and return what was found, in the order of looking."""
    workers, unfinished, queues, loops = await asyncio.gather(
        Registry(store).read(), read_counts(store, UNFINISHED), read_queues(store), loop_names(store)
    )
    parts = (
        _server(store),
        _collection(store),
        _fleet(workers, unfinished, queues, loops),
        _headroom([worker for worker in workers if worker.live]),
        _schedules(store, [worker for worker in workers if worker.live]),
        _needs(store, workers),
        _data_changes(store, [worker for worker in workers if worker.live]),
        _tasks(store),
        _flows(store),
    )
    # Side by side: some fifty looks, and a person waits.
    return [finding for found in await asyncio.gather(*map(_all_of, parts)) for finding in found]


async def _all_of(part: AsyncIterator[Finding]) -> list[Finding]:
    return [finding async for finding in part]


async def _server(store: Store) -> AsyncIterator[Finding]:
    hello = await server_state.hello(store)
    version = (await server_state.build(store))["version"]
    if hello["maxWireVersion"] < schema.OLDEST_WIRE_VERSION:
        yield Finding(level="error", subject="server", found=f"MongoDB {version}", remedy="upgrade it to 6.0 or newer")
    else:
        yield Finding(level="ok", subject="server", found=f"MongoDB {version}")
    if hello.get("msg") == "isdbgrid":
        yield Finding(level="ok", subject="topology", found="a sharded cluster")
    else:
        async for finding in _replica_set(store, hello["setName"]):
            yield finding
    yield await _clock(store)
    yield await _oplog(store)
    open_too_long = await server_state.long_transactions(store, TRANSACTION_S)
    if open_too_long is None:
        yield Finding(level="note", subject="transactions", found="this user may not see them (inprog)")
    elif open_too_long:
        yield Finding(
            level="warning",
            subject="transactions",
            found=f"{open_too_long} open for more than {TRANSACTION_S:.0f} s: they block writes to tasks they changed",
            remedy="publish at the end of a transaction, not at its beginning, and keep transactions short",
        )
    else:
        yield Finding(level="ok", subject="transactions", found=f"none open for more than {TRANSACTION_S:.0f} s")


async def _replica_set(store: Store, name: str) -> AsyncIterator[Finding]:
    members = await server_state.members(store)
    if members is None:
        yield Finding(level="note", subject="topology", found=f"replica set {name}; this user may not see its members")
        return
    down = [member["name"] for member in members if member["health"] != 1]
    arbiters = [member["name"] for member in members if member["stateStr"] == "ARBITER"]
    if down:
        yield Finding(
            level="error",
            subject="topology",
            found=f"replica set {name}: {', '.join(down)} cannot be reached",
            remedy="bring it back, or remove it with rs.remove(): majority writes count it",
        )
    elif arbiters:
        yield Finding(
            level="warning",
            subject="topology",
            found=f"replica set {name} has an arbiter ({', '.join(arbiters)})",
            remedy="a member that holds data instead: with one data member down, majority writes and streams stand still",
        )
    elif len(members) == 1:
        yield Finding(
            level="note",
            subject="topology",
            found=f"replica set {name} has a single member: no failover",
            remedy="three members for production",
        )
    else:
        yield Finding(level="ok", subject="topology", found=f"replica set {name} with {len(members)} healthy members")


async def _clock(store: Store) -> Finding:
    sent = time.time()
    server = (await server_state.hello(store))["localTime"]
    offset = server.timestamp() - (sent + time.time()) / 2
    if abs(offset) < CLOCK_TOLERANCE_S:
        return Finding(level="ok", subject="clock", found=f"ours and the server's differ by {abs(offset):.2f} s")
    return Finding(
        level="note",
        subject="clock",
        found=f"the server's is {offset:+.1f} s off ours; leases do not care, people who read times do",
        remedy="run NTP on both",
    )


async def _oplog(store: Store) -> Finding:
    window = await server_state.oplog_window_s(store)
    if window is None:
        return Finding(level="note", subject="oplog", found="this user may not see how far back it goes")
    said = f"it reaches back {duration(window * 1_000)}"
    if window >= OPLOG_WANTED_S:
        return Finding(level="ok", subject="oplog", found=said)
    # Never worse than a note: an oplog that was not full yet says nothing about its size.
    return Finding(
        level="note",
        subject="oplog",
        found=f"{said}; a stream that was away for longer begins anew, with a scan (nothing is lost)",
        remedy="if it is full already: db.adminCommand({replSetResizeOplog: 1, size: …, minRetentionHours: 24})",
    )


async def _collection(store: Store) -> AsyncIterator[Finding]:
    size = await server_state.size(store)
    if size is not None:
        yield Finding(
            level="ok",
            subject="collection",
            found=f"{store.driver.database.name}.{store.tasks}: {size['count']} tasks, {size['size'] / 1e6:.1f} MB",
        )
    yield Finding(level="ok", subject="schema", found=f"version {schema.SCHEMA_VERSION}")
    indexes = await server_state.index_use(store)
    if indexes is None:
        yield Finding(level="note", subject="indexes", found="this user may not see their use (clusterMonitor)")
    elif not indexes:  # every collection that exists has one
        yield Finding(
            level="note",
            subject="collection",
            found=f"there is no collection {store.tasks!r} in database {store.driver.database.name!r} of {reach.hosts(store)}",
            remedy="if there should be tasks, name another database or collection; else the first worker creates it",
        )
    else:
        ours = {f"taskmesh_{name}": dict(keys) for name, (keys, _) in schema.INDEXES.items()}
        missing = [name for name, keys in ours.items() if dict(indexes.get(name, {}).get("key", {})) != keys]
        if missing:
            yield Finding(
                level="error",
                subject="indexes",
                found=f"missing or of another shape: {', '.join(missing)}",
                remedy="start anything that connects (it creates them) with a user that may",
            )
        else:
            used = ", ".join(f"{name.removeprefix('taskmesh_')} {indexes[name]['ops']}" for name in ours)
            yield Finding(level="ok", subject="indexes", found=f"all there; used since the server's start: {used}")
        foreign = {name: index["ops"] for name, index in indexes.items() if name not in ours and name != "_id_"}
        if idle := [name for name, ops in foreign.items() if ops == 0]:
            yield Finding(
                level="warning",
                subject="indexes",
                found=f"not taskmesh's, and never used since the server's start: {', '.join(idle)}",
                remedy="drop them unless you know why they are there: each of them slows down every claim",
            )
    lag = await server_state.past_retention(store, TTL_LAG_S)
    if lag:
        yield Finding(
            level="warning",
            subject="retention",
            found=f"{_many(lag)} tasks should have been deleted {duration(TTL_LAG_S * 1_000)} ago or more",
            remedy="look at serverStatus().metrics.ttl, and whether ttlMonitorEnabled is on; `taskmesh purge` helps now",
        )
    else:
        yield Finding(level="ok", subject="retention", found="what is over is deleted in time")


async def _fleet(
    workers: list[WorkerInfo], counts: dict[str, dict[str, int]], queues: list[QueueInfo], loops: Collection[str]
) -> AsyncIterator[Finding]:
    live = [worker for worker in workers if worker.live]
    gone = [worker.worker_id for worker in workers if worker.state == "gone"]
    waiting = {name: sum(by_status.values()) for name, by_status in counts.items()}
    known = known_names(live)
    unknown = {name: n for name, n in waiting.items() if n and name not in known}
    if not live:
        unfinished = sum(waiting.values())
        yield Finding(
            level="error" if unfinished else "note",
            subject="workers",
            found=f"none is alive; {unfinished} tasks are unfinished",
            remedy="taskmesh worker MODULE:MESH",
        )
    else:
        versions = sorted({worker.version for worker in live})
        yield Finding(level="ok", subject="workers", found=f"{len(live)} alive, of version {', '.join(versions)}")
        for name, count in sorted(unknown.items()):
            if name in loops:
                yield Finding(
                    level="warning",
                    subject="loops",
                    found=f"{name!r} is a loop or a singleton that no live worker declares: it waits unclaimed",
                    remedy=f"deploy workers that declare it, or remove it: taskmesh delete --where 'name:{name}'",
                )
                continue
            yield Finding(
                level="error",
                subject="workers",
                found=f"{count} unfinished {'task' if count == 1 else 'tasks'} {name!r}, which no live worker knows",
                remedy=f"deploy workers with that handler, or cancel them: taskmesh cancel --where 'name:{name}'",
            )
    if gone:
        yield Finding(
            level="warning",
            subject="workers",
            found=f"{len(gone)} went without a word within the last hour: {', '.join(gone[:3])}",
            remedy="their hosts' logs say why (out of memory?); their tasks have moved when the leases ran out",
        )
    for queue in queues:
        if queue.paused and queue.waiting:
            yield Finding(
                level="warning",
                subject="queues",
                found=f"{queue.queue!r} is {queue.shut_because}, and {_waiting(queue)} in it",
                remedy=f"taskmesh resume {queue.queue}",
            )
        if queue.dead_letters:
            more = " or more" if queue.dead_letters >= COUNTED_TO else ""
            yield Finding(
                level="note",
                subject="dead letters",
                found=f"{queue.dead_letters}{more} in {queue.queue!r}",
                remedy=f"taskmesh errors tells why; taskmesh redrive {queue.queue} sends them back to their queues",
            )
        for group, pause in queue.paused_groups.items():
            if queue.waiting:
                yield Finding(
                    level="warning",
                    subject="queues",
                    found=f"group {group!r} of {queue.queue!r} is {pause.sentence}",
                    remedy=f"taskmesh resume {queue.queue} --group {shlex.quote(group)}",
                )
        if live and queue.waiting and not any(worker.takes_from(queue.queue) for worker in live):
            yield Finding(
                level="error",
                subject="queues",
                found=f"{_waiting(queue)} in {queue.queue!r}, from which no live worker takes",
                remedy=f"taskmesh worker MODULE:MESH --queues {queue.queue}",
            )


async def _needs(store: Store, workers: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """Tasks that live workers run, but none that has the labels which they need."""
    for queue, name, needs, count in await server_state.needs_of_waiting(store) or ():
        if able_workers(workers, name, queue) and not able_workers(workers, name, queue, needs=needs):
            labels = [f"--label {shlex.quote(need)}" for need in needs]
            waits = "1 task waits" if count == 1 else f"{count} tasks wait"
            yield Finding(
                level="error",
                subject="needs",
                found=f"{waits} ({name!r} in {queue!r}) for a worker with {', '.join(needs)}, which no live one has",
                remedy=f"taskmesh worker MODULE:MESH {' '.join(labels)}",
            )


async def _headroom(live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """How near the live workers came to losing what they run, within the last hour."""
    lefts = [(left.share, left.name, worker.worker_id) for worker in live for left in worker.lease_left]
    near = sorted(left for left in lefts if left[0] < LEASE_LEFT_WANTED)
    if near:
        share, name, worker_id = near[0]
        yield Finding(
            level="warning",
            subject="headroom",
            found=f"a lease of {name!r} on {worker_id} was renewed when {share:.0%} of it was left; at 0 it runs twice",
            remedy="a longer worker_timeout_ms, and look at what held up its pings: the host, or the way to the database",
        )
    elif lefts:
        yield Finding(
            level="ok", subject="headroom", found=f"{min(lefts)[0]:.0%} of a lease was left at the least, when renewed"
        )
    for worker in live:
        if worker.stood_still_ms:
            yield Finding(
                level="warning",
                subject="event loop",
                found=f"that of {worker.worker_id} stood still for {duration(worker.stood_still_ms)} within the last hour",
                remedy="its log names the handler that blocked it: make that handler a plain function (it runs in a thread)",
            )
        if abs(worker.clock_off_ms) > CLOCK_TOLERANCE_S * 1000:
            yield Finding(
                level="note",
                subject="worker clocks",
                found=f"that of {worker.host} ({worker.worker_id}) is {worker.clock_off_ms / 1000:+.1f} s off the server's; "
                "leases do not care, who reads its log does",
                remedy="run NTP there",
            )
        lost = worker.claims_lost_share
        if lost is not None and worker.claims_tried >= CLAIMS_TELLING and lost > CLAIMS_LOST_TOLERATED:
            yield Finding(
                level="note",
                subject="claims",
                found=f"{lost:.0%} of the {worker.claims_tried} claims of {worker.worker_id} within the last hour won nothing: "
                "others had the tasks already",
                remedy="nothing waits for it, but the server looks at each of these tasks in vain: if it is busy, the same "
                "number of slots in fewer workers loses fewer claims",
            )


async def _schedules(store: Store, live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    known = known_names(live)
    for schedule in await schedules.read_all(store):
        name = schedule.get("name")
        if live and name not in known and not schedule.get("paused"):
            yield Finding(
                level="warning",
                subject="schedules",
                found=f"{schedule['_id']!r} publishes {name!r}, which no live worker knows",
                remedy=f"deploy workers with that handler, or: taskmesh pause-schedule {schedule['_id']}",
            )


async def _data_changes(store: Store, live: list[WorkerInfo]) -> AsyncIterator[Finding]:
    """Whether the changes of data that become tasks are read. Those that no live worker declares are found among the loops."""
    known = known_names(live)
    for place in await data_changes.read_all(store):
        reader, namespace = reader_name(place["task"]), place["namespace"]
        if reader not in known:
            continue
        changes, trouble = f"changes of {namespace} for {place['task']!r}", place.get("trouble")
        age: float = place.get("age_ms") or 0.0
        if trouble is not None and trouble["lost"]:
            yield Finding(
                level="error",
                subject="data changes",
                found=f"{changes} are lost: the oplog does not reach back to where they were read last, {duration(age)} ago",
                remedy="see to what changed since then, and deploy on_lost='skip': from then on it reads from now",
            )
        elif trouble is not None:
            yield Finding(
                level="error",
                subject="data changes",
                found=f"{changes} have not been read for {duration(age)}: {trouble['reason']}",
                remedy=f"correct the pipeline, or what it meets there: taskmesh show {reader} fleet",
            )
        elif age > UNREAD_MS:
            yield Finding(
                level="error",
                subject="data changes",
                found=f"{changes} have not been read for {duration(age)}; behind the end of the oplog they are lost",
                remedy=f"a worker that takes from the queue 'changes': taskmesh explain {reader} fleet",
            )
        else:
            yield Finding(level="ok", subject="data changes", found=f"{changes} are read")
        for gap in place.get("gaps", ()):
            if (place["now"] - gap["to"]).total_seconds() < GAP_TOLD_S:
                yield Finding(
                    level="warning",
                    subject="data changes",
                    found=f"{changes} between {gap['from']:%F %T} and {gap['to']:%F %T} UTC are lost, and made no tasks",
                    remedy="see to what changed then; a larger oplog, or workers that are away for less long",
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
        yield Finding(
            level="warning",
            subject="inserted",
            found=f"no worker ever accepts {', '.join(map(shown, strangers))}: not inserted as taskmesh's protocol says",
            remedy="status must be 'INIT', and _id name:key, of the fields name and key: delete it, and insert it again",
        )
    if late:
        yield Finding(
            level="warning",
            subject="leases",
            found=f"{_many(late)} tasks lost their worker more than {UNCLAIMED_S:.0f} s ago, and nobody has taken them over",
            remedy="is a worker alive that knows them, with free slots? `taskmesh explain NAME KEY` tells for one",
        )
    if stranded:
        yield Finding(
            level="warning",
            subject="dependencies",
            found=f"gate closed, nothing pending: {', '.join(stranded)} wait for tasks that are all finished, not all as SUCCESS",
            remedy="with on_dependency_failure='wait': retry what failed, or publish again what was deleted and retry these",
        )
    if crossed:
        head, behind = map(label, crossed)
        yield Finding(
            level="error",
            subject="sequences",
            found=f"{head} waits for {behind}, which is behind it in its own sequence: neither ever runs",
            remedy=f"cancel {head}, and retry it when {behind} is done",
        )
    if short:
        yield Finding(
            level="warning",
            subject="leases",
            found=f"worker_timeout_ms is less than two pings for {', '.join(short[:5])}: one late ping loses a task",
            remedy="set it to three times ping_interval_ms or more",
        )
    if large:
        largest = large[0]
        yield Finding(
            level="warning",
            subject="tasks",
            found=f"{len(large)} or more are over 4 MB; {largest['_id']!r} has {largest['bytes'] / 1e6:.1f} MB of at most 16",
            remedy="keep what is large elsewhere, and its place in the params",
        )


async def _flows(store: Store) -> AsyncIterator[Finding]:
    if left_open := await server_state.open_flows(store, FLOW_OPEN_S):
        named = ", ".join(map(repr, left_open))
        yield Finding(
            level="warning",
            subject="flows",
            found=f"{named}: begun more than {duration(FLOW_OPEN_S * 1_000)} ago and not published to the end: none of it runs",
            remedy="publish it again: the same code completes it; or give it up: taskmesh flow KEY --cancel",
        )


def _waiting(queue: QueueInfo) -> str:
    if queue.waiting == 1 and not queue.more_waiting:
        return "1 task waits"
    return f"{queue.waiting}{' or more' if queue.more_waiting else ''} tasks wait"


def _many(count: int) -> str:
    return "1000 or more" if count >= 1_000 else str(count)
