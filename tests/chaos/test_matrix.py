"""Every verb of the store, met by every fault: nothing is lost, nothing runs twice, nothing is charged, and the loops live on.

Generated: the verbs are found by looking at the store, their commands by watching a life without faults.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from pymongo import MongoClient

from tests.chaos.life import EXPECTED_FAILS, EXPECTED_LOSSES, EXPECTED_RUNS, Life, live
from tests.chaos.proxy import Proxy
from tests.chaos.verbs import CommandsOfVerbs, verbs, watched
from tests.mongod import Mongod
from tests.mongods import quick_directory, small_mongod

pytestmark = (
    pytest.mark.blocks_the_loop
)  # the trap is armed by a blocking call of its own, just before a verb is called

_OFF_THE_PATH = (
    "acceptance",
    "apart",
    "audit",
    "broadcasts",
    "data_changes",
    "failure_pauses",
    "flows",
    "limits",
    "loops",
    "schedules",
    "sequences",
)
"""Modules of verbs that have fault tests of their own (acceptance: tests/client/test_inserted_elsewhere.py; limits that survive
crashes, data changes, failure pauses, what is stored apart: tests/consumer; flows: tests/flows; loops and broadcasts:
tests/loops; sequences: tests/processes, tests/consumer). An audit may fail: it is told, not promised."""
_LOST_REPLY = "the reply is lost"
FAULTS: dict[str, dict[str, Any]] = {
    _LOST_REPLY: {},
    "the connection is cut before": {"closeConnection": True},
    "NotWritablePrimary": {"errorCode": 10107},
    "ExceededTimeLimit": {"errorCode": 262},
    "MaxTimeMSExpired": {"errorCode": 50},
    "WriteConcernFailed": {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
    "ChangeStreamHistoryLost": {"errorCode": 286},
    "CursorNotFound": {"errorCode": 43},
    "DuplicateKey": {"errorCode": 11000},
}
_WRITES = {"insert", "update", "findAndModify", "delete", "commitTransaction"}
_ONLY_FOR: dict[str, set[str]] = {
    "WriteConcernFailed": _WRITES,
    "ChangeStreamHistoryLost": {"aggregate", "getMore"},
    "CursorNotFound": {"getMore"},
    "DuplicateKey": {"insert"},
}
_CANNOT_BE = {
    # A transaction that has seen that a key is free conflicts with whoever takes it meanwhile (WriteConflict).
    ("publish.publish_in_session", "DuplicateKey"),
}
_ELSEWHERE = {
    "registry.loop_names": "asked by stats and doctor: tests/loops",
    "renew.held_of": "asked by a worker that does not listen: tests/consumer/test_who_listens.py",
    "renew.end_lease": "what a fault test does: tests/docs/test_testing.py",
    "registry.retentions_ms": "asked for latencies of queues: tests/admin/test_latencies.py",
    "registry.read_definition": "asked by who publishes by name: tests/client/test_by_name.py",
    "control.restore_children": "asked of children that were cancelled with their parent: tests/durable/test_children.py",
    "children.name_parent": "writes where a parent waits for other children than it has started: tests/durable/test_children.py",
    "dependencies.check": "asked in somebody's transaction, else by dependencies.there: tests/flows",
    "dependencies.any_marks": "asked with until_idle: tests/consumer/test_when_it_runs.py",
    "dependencies.open_edges": "asked by explain, of what waits for others",
    "steps.read": "asked where records are too many to come with the claim: tests/durable",
    "steps.whether_recorded": "asked after a fault, so here after every one at steps.record",
    "schema.check_readable": "asked by who only looks: tests/store/test_connecting.py",
    "find.fitting": "asked if on_claim has a filter: tests/consumer/test_unclaimable_head.py",
    "find.judged": "part of a scan; it asks by find.look_up, which is here",
    "find.places_in_use": "asked once a minute, for tasks that nobody runs: tests/consumer/test_deploy_skew.py; and of what is in"
    " use in very many queues and names: tests/consumer/test_many_queues.py",
    "find.open_scan": "reads behind tasks that are refused: tests/consumer/test_unclaimable_head.py",
    "find.queues_in_use": "asked where more is due than one look shows: tests/consumer/test_many_queues.py",
    "find.unfinished_left": "asked with until_idle: tests/consumer/test_when_it_runs.py",
    "finish.whether_recorded": "asked after a fault, so here after every one at finish.finish",
    "groups.queues_with_groups": "asked where a scan does not see all that is due: tests/consumer/test_turns.py",
    "groups.groups_due": "asked where a queue with groups has a backlog: tests/consumer/test_turns.py",
    "first_of.first_of": "asked where a queue with groups has a backlog: tests/consumer/test_turns.py; and where a limited queue"
    " has room: tests/consumer/test_room_in_hand.py",
    "malformed.strangers": "asked where a change is refused for good: tests/admin/test_strangers.py",
    "registry.dead_letter_queues": "asked where queues are listed: tests/admin/test_dead_letters.py",
    "registry.pause_group": "asked by people, about a queue's groups: tests/consumer/test_groups.py",
    "registry.forget": "after a predecessor that was killed: tests/processes/test_worker_id.py",
    "blocking.publish_in_any_session": "with a session of a blocking client: tests/client/test_loops_and_forks.py",
    "renew.still_held": "asked after a fault, so here after every one at renew.ping",
}
_STREAM = "change_stream.getMore"
"""No function of the store, but what is sent when the stream is read."""
VERBS = sorted(
    {_STREAM} | {verb for verb in verbs() if verb.partition(".")[0] not in _OFF_THE_PATH and verb not in _ELSEWHERE}
)


@dataclass
class Servers:
    """The server of this module, and the proxy through which the engine reaches it."""

    mongod: Mongod
    proxy: Proxy
    commands: dict[str, set[str]] = field(default_factory=dict)
    """What each verb sends."""

    @property
    def uri(self) -> str:
        return f"mongodb://127.0.0.1:{self.proxy.port}/?directConnection=true"


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with quick_directory() as directory, small_mongod(directory / "db") as mongod:
        mongod.initiate()
        with Proxy(mongod.port) as proxy:
            yield Servers(mongod, proxy)


@pytest.fixture
async def commands(servers: Servers) -> dict[str, set[str]]:
    if not servers.commands:
        listener = CommandsOfVerbs()
        with watched(lambda _: None):
            _check(await live(servers.uri, f"learning_{uuid.uuid4().hex[:8]}", listener))
        servers.commands = {**listener.commands, _STREAM: {"getMore"}}
    return servers.commands


@pytest.mark.chaos
async def test_a_life_calls_every_verb(commands: dict[str, set[str]]) -> None:
    assert sorted(set(VERBS) - set(commands)) == [], "these are not put to the test"


_ALWAYS = {
    ("claim.claim", _LOST_REPLY): ["update"],
    (_STREAM, "ChangeStreamHistoryLost"): ["getMore"],
    ("finish.finish", "WriteConcernFailed"): ["update"],
}
"""A few seconds' worth of the matrix, in `make test`, with what each verb sends; the whole takes a quarter of an hour."""


async def test_three_faults_in_one_life_cost_nothing(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    assert (_ALWAYS.keys() | _CANNOT_BE) <= set(itertools.product(VERBS, FAULTS)), "a verb has another name now"
    traps = [_Trap(servers, *cell, commands) for cell, commands in _ALWAYS.items()]
    lost_reply, *others = traps

    def before(verb: str) -> None:
        lost_reply.before(verb)
        # The server has but one failpoint for all commands: one fault, and then the other.
        for trap in others:
            trap.before(verb)
            if trap.left:
                break

    lost, failed = servers.proxy.lost_replies, lost_reply.failed_so_far()
    listener = CommandsOfVerbs()
    life = await _trapped(servers, "matrix_always", before, traps, caplog, listener, until_sprung=True)
    _check(life)
    assert sorted(set(VERBS) - {_STREAM} - set(listener.commands)) == [], "the matrix does not put these to the test"
    assert [trap.left for trap in traps] == [0, 0, 0], "each verb was called as often as it was to be disturbed"
    assert servers.proxy.lost_replies > lost
    assert lost_reply.failed_so_far() >= failed + 2, "both faults were met"


@pytest.mark.chaos
@pytest.mark.parametrize(("verb", "fault"), list(itertools.product(VERBS, FAULTS)))
async def test_a_fault_at_a_verb_costs_nothing(
    servers: Servers,
    commands: dict[str, set[str]],
    caplog: pytest.LogCaptureFixture,
    verb: str,
    fault: str,
) -> None:
    hit = commands.get(verb, set()) & _ONLY_FOR.get(fault, commands.get(verb, set()))
    if not hit or (fault == "ChangeStreamHistoryLost" and not verb.startswith("watch.")) or (verb, fault) in _CANNOT_BE:
        return  # no command of this verb can meet that
    trap = _Trap(servers, verb, fault, sorted(hit))
    database = f"matrix_{verb.replace('.', '_')}_{list(FAULTS).index(fault)}"
    _check(await _trapped(servers, database, trap.before, [trap], caplog))


async def _trapped(
    servers: Servers,
    database: str,
    before: Callable[[str], None],
    traps: list[_Trap],
    caplog: pytest.LogCaptureFixture,
    listener: CommandsOfVerbs | None = None,
    *,
    until_sprung: bool = False,
) -> Life:
    """Live with these traps, `until_sprung` for as long as one is left; nothing may be logged as an error."""
    try:
        with caplog.at_level(logging.ERROR, "taskmesh"), watched(before):
            complete = (lambda: not any(trap.left for trap in traps)) if until_sprung else (lambda: True)
            life = await live(servers.uri, database, listener, complete=complete)
    finally:
        for trap in traps:
            trap.disarm()
        with MongoClient[dict[str, Any]](servers.mongod.uri) as client:
            client.drop_database(database)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    return life


class _Trap:
    """Breaks the first two calls of a verb."""

    def __init__(self, servers: Servers, verb: str, fault: str, commands: list[str]) -> None:
        self._servers, self._fault, self._commands = servers, fault, commands
        self._verb = "change_stream.open_stream" if verb == _STREAM else verb
        self.left = 2
        self._lock = threading.Lock()

    def before(self, verb: str) -> None:
        """Called wherever a verb is about to be called."""
        with self._lock:
            if verb != self._verb or not self.left:
                return
            self.left -= 1
        if self._fault == _LOST_REPLY:
            self._servers.proxy.lose_replies(self._commands)
        else:
            data = {"failCommands": self._commands, "appName": "taskmesh", **FAULTS[self._fault]}
            self._configure({"times": 1}, data)

    def failed_so_far(self) -> int:
        """How many commands the server's failpoint has made fail, whoever armed it. Disarms it."""
        return int(self._configure("off")["count"])

    def disarm(self) -> None:
        """Let everything be well again."""
        self._servers.proxy.heal()
        self._configure("off")

    def _configure(self, mode: Any, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with MongoClient[dict[str, Any]](self._servers.mongod.uri) as client:
            return client.admin.command("configureFailPoint", "failCommand", mode=mode, data=data or {})


def _check(life: Life) -> None:
    runs = {key: life.runs[key] for key in EXPECTED_RUNS}
    # A fault inside a handler's transaction undoes it, and the handler runs again: charged for nothing, and nothing doubled.
    assert 1 <= runs.pop("writes") <= 3
    # Who asks for a retry again, since the answer to the first was an error, may get one run more.
    assert 2 <= runs.pop("anew") <= 1 + life.asked_anew
    assert life.effects == 1
    assert runs == {key: count for key, count in EXPECTED_RUNS.items() if key in runs}, life.told
    finished = {key: status for key, status in life.statuses.items() if key in EXPECTED_RUNS}
    assert set(finished.values()) == {"SUCCESS"}, finished
    assert len(finished) == len(EXPECTED_RUNS)
    assert life.statuses["cancelled"] == "CANCELLED"
    assert (life.statuses["stopped"], life.runs["stopped"]) == ("CANCELLED", 1)
    assert life.statuses["expires"] == "EXPIRED"
    assert "deleted" not in life.statuses
    assert (life.statuses["journey"], life.charged["journey"]) == ("SUCCESS", (0, 0)), life.told
    assert (life.statuses["given-up"], life.statuses["orphan"]) == ("CANCELLED", "CANCELLED")
    assert life.steps == {"number": 1}, "what is recorded does not run again"
    charged = {key: charged for key, charged in life.charged.items() if key in EXPECTED_RUNS}
    assert charged == {key: (EXPECTED_LOSSES.get(key, 0), EXPECTED_FAILS.get(key, 0)) for key in EXPECTED_RUNS}
