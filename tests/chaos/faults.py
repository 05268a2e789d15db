"""The faults of a run, each by name: what it does, and how it is healed again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pymongo.errors import PyMongoError

from taskmesh.embedded import replica
from tests.chaos.cluster import Cluster
from tests.chaos.producer import PAUSED_AT_TIMES
from tests.chaos.world import World

FAULTS: dict[str, tuple[int, Callable[[Chaos], None]]] = {}
"""By name: how often, and what."""
_REPLIES = ("update", "findAndModify", "insert", "find", "aggregate", "getMore", "commitTransaction", "hello")
_ERRORS: dict[str, dict[str, object]] = {
    "closeConnection": {"closeConnection": True},
    "NotWritablePrimary": {"errorCode": 10107},
    "ShutdownInProgress": {"errorCode": 91},
    "ExceededTimeLimit": {"errorCode": 262},
    "MaxTimeMSExpired": {"errorCode": 50},
    "WriteConcernFailed": {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}},
    "ChangeStreamHistoryLost": {"errorCode": 286},
    "CursorNotFound": {"errorCode": 43},
}
_FAILING = {
    "update": ("closeConnection", "NotWritablePrimary", "ShutdownInProgress", "MaxTimeMSExpired", "WriteConcernFailed"),
    "findAndModify": ("closeConnection", "NotWritablePrimary", "ExceededTimeLimit", "WriteConcernFailed"),
    "insert": ("closeConnection", "NotWritablePrimary", "ExceededTimeLimit", "WriteConcernFailed"),
    "find": ("closeConnection", "NotWritablePrimary", "ExceededTimeLimit"),
    "aggregate": ("closeConnection", "NotWritablePrimary", "ChangeStreamHistoryLost"),
    "getMore": ("closeConnection", "CursorNotFound", "ShutdownInProgress"),
    "commitTransaction": ("closeConnection", "NotWritablePrimary", "WriteConcernFailed"),
}


@dataclass
class Chaos:
    """What faults act on."""

    world: World
    cluster: Cluster

    def seconds(self, least: float, most: float) -> None:
        """Let the fault last."""
        self.world.pause(self.world.chance.uniform(least, most))


def fault(name: str, often: int = 1) -> Callable[[Callable[[Chaos], None]], Callable[[Chaos], None]]:
    """Enter a fault under its name."""

    def enter(function: Callable[[Chaos], None]) -> Callable[[Chaos], None]:
        FAULTS[name] = often, function
        return function

    return enter


# --- workers ---


@fault("worker killed (SIGKILL)", 6)
def kill_worker(chaos: Chaos) -> None:
    """A crash."""
    chaos.world.any_worker().kill()


@fault("worker suspended for longer than its lease", 4)
def suspend_worker(chaos: Chaos) -> None:
    """A laptop's lid, a hypervisor, a long collection of garbage."""
    worker = chaos.world.any_worker()
    worker.suspend()
    chaos.seconds(2.2, 5.0)
    worker.resume()


@fault("worker suspended for less than its lease", 2)
def suspend_worker_briefly(chaos: Chaos) -> None:
    """Not long enough to lose anything, perhaps."""
    worker = chaos.world.any_worker()
    worker.suspend()
    chaos.seconds(0.3, 1.5)
    worker.resume()


@fault("all workers told to stop (SIGTERM storm)", 2)
def stop_workers(chaos: Chaos) -> None:
    """A deploy."""
    for worker_id in chaos.world.worker_ids:
        worker = chaos.world.newest(worker_id)
        worker.terminate()
        if chaos.world.chance.random() < 0.3:
            worker.terminate()
        chaos.seconds(0.1, 0.8)


@fault("queue paused for a while", 1)
def pause_queue(chaos: Chaos) -> None:
    """No fault, but what people do; for longer than workers may take to hear of it."""
    chaos.world.set_paused(PAUSED_AT_TIMES, True)
    chaos.seconds(6.0, 8.0)
    chaos.world.set_paused(PAUSED_AT_TIMES, False)


# --- servers ---


@fault("primary killed (SIGKILL), started again", 3)
def kill_primary(chaos: Chaos) -> None:
    """A machine that loses power."""
    member = chaos.cluster.members[chaos.cluster.primary()]
    member.kill()
    chaos.seconds(1.0, 5.0)
    member.start()


@fault("primary stepped down", 3)
def step_down(chaos: Chaos) -> None:
    """Maintenance."""
    chaos.cluster.step_down()
    chaos.seconds(1.0, 3.0)


@fault("primary frozen (SIGSTOP)", 3)
def freeze_primary(chaos: Chaos) -> None:
    """A disk that hangs: connections stay open and nothing answers."""
    member = chaos.cluster.members[chaos.cluster.primary()]
    member.suspend()
    chaos.seconds(2.0, 6.0)
    member.resume()


@fault("primary restarted with an empty cache", 1)
def restart_primary(chaos: Chaos) -> None:
    """An upgrade."""
    member = chaos.cluster.members[chaos.cluster.primary()]
    member.stop()
    member.start()


@fault("secondary lost", 2)
def lose_secondary(chaos: Chaos) -> None:
    """One machine less, but still a majority."""
    primary = chaos.cluster.primary()
    number = chaos.world.chance.choice([i for i in range(len(chaos.cluster.members)) if i != primary])
    chaos.cluster.members[number].kill()
    chaos.seconds(2.0, 5.0)
    chaos.cluster.members[number].start()


@fault("two nodes lost: no majority", 2)
def lose_majority(chaos: Chaos) -> None:
    """Nothing can be written for a while."""
    lost = chaos.world.chance.sample(chaos.cluster.members, 2)
    for member in lost:
        member.kill()
    chaos.seconds(2.0, 6.0)
    for member in lost:
        member.start()


# --- network ---


@fault("all connections cut", 3)
def cut_everything(chaos: Chaos) -> None:
    """A firewall that forgot."""
    for proxy in chaos.cluster.proxies:
        proxy.cut()


@fault("primary half-open: nothing comes back", 3)
def hang_primary(chaos: Chaos) -> None:
    """A cable that somebody pulled."""
    proxy = chaos.cluster.proxies[chaos.cluster.primary()]
    proxy.hang(True)
    chaos.seconds(2.0, 6.0)
    if chaos.world.chance.random() < 0.5:
        proxy.cut()
    proxy.heal()


@fault("primary out of reach", 2)
def partition_primary(chaos: Chaos) -> None:
    """It runs, and nobody reaches it."""
    proxy = chaos.cluster.proxies[chaos.cluster.primary()]
    proxy.refuse(True)
    chaos.seconds(1.0, 4.0)
    proxy.heal()


@fault("network slow", 2)
def slow_network(chaos: Chaos) -> None:
    """Every message takes its time, everywhere."""
    for proxy in chaos.cluster.proxies:
        proxy.slow(chaos.world.chance.uniform(0.01, 0.06))
    chaos.seconds(2.0, 5.0)
    for proxy in chaos.cluster.proxies:
        proxy.slow(0.0)


@fault("replies lost after the server acted", 6)
def lose_replies(chaos: Chaos) -> None:
    """The worst moment for a connection to go."""
    proxy = chaos.cluster.proxies[chaos.cluster.primary()]
    for command in chaos.world.chance.sample(_REPLIES, 3):
        proxy.lose_replies(command, chaos.world.chance.randrange(1, 5))
    chaos.seconds(1.0, 3.0)
    proxy.heal()


# --- errors of the server ---


@fault("commands failed by a fail point", 8)
def fail_commands(chaos: Chaos) -> None:
    """What a server in trouble answers."""
    chance = chaos.world.chance
    command = chance.choice(list(_FAILING))
    error = _ERRORS[chance.choice(_FAILING[command])]
    address = chaos.cluster.members[chaos.cluster.primary()].address
    with suppress(PyMongoError), replica.direct_client(address) as client:
        client.admin.command(
            "configureFailPoint",
            "failCommand",
            mode={"times": chance.randrange(1, 8)},
            data={"failCommands": [command], "appName": "taskmesh", **error},
        )
        chaos.seconds(0.5, 2.0)
        client.admin.command("configureFailPoint", "failCommand", mode="off")
