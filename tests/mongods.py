"""Real servers for tests: how a `mongod` is configured here, and a replica set of three that can lose members."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pymongo.errors import PyMongoError

from taskmesh.embedded import replica
from tests.leftovers import IN_MEMORY, ends_with_us
from tests.mongod import Mongod
from tests.processes.wrong_clock import clock_off
from tests.waiting import wait_until

PARAMETERS: dict[str, object] = {
    "enableTestCommands": 1,  # failpoints: configureFailPoint
    "ttlMonitorSleepSecs": 1,  # TTL indexes delete within a second, not within a minute
}

# Ten seconds until an election, as in production, would make every failover test that slow.
QUICK_ELECTIONS = {"electionTimeoutMillis": 1_000, "heartbeatIntervalMillis": 300}


_ENOUGH_MEMORY = 8_000_000_000
"""Free bytes: a server of tests needs less than half of one GB, and some run at once."""


@contextmanager
def quick_directory() -> Iterator[Path]:
    """Make a directory for servers: in memory if there is much of it, else on disk.

    Every acknowledged write waits for the disk, milliseconds on many machines. What is written survives the end of a server,
    also by SIGKILL, in either place.
    """
    quick = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free >= _ENOUGH_MEMORY
    place = str(IN_MEMORY) if quick else None
    with TemporaryDirectory(prefix="taskmesh-tests-", dir=place, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


class _MongodOfTests(Mongod):
    """One that ends with the process of the tests, and whose clock is off by `clock_s`, whenever it is started."""

    clock_s = 0.0

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        with clock_off(self.clock_s):
            process = super()._spawn(port)
        ends_with_us(process.pid, self.dbpath)
        return process


def small_mongod(
    dbpath: Path,
    *,
    replica_set: str | None = "rs0",
    clock_s: float = 0.0,
    parameters: Mapping[str, object] | None = None,
) -> Mongod:
    """Return a small server with failpoints, not started yet; `replica_set=None` makes it a standalone.

    `clock_s`: how far its wall clock is to be off (needs libfaketime). `parameters`: more of the server's.
    """
    all_parameters = {**PARAMETERS, **(parameters or {})}
    server = _MongodOfTests(dbpath, replica_set=replica_set, cache_gb=0.25, parameters=all_parameters)
    server.clock_s = clock_s
    return server


@dataclass(frozen=True)
class ThreeNodes:
    """A replica set of three real servers, any of which a test may kill, suspend and start again."""

    members: tuple[Mongod, Mongod, Mongod]

    @property
    def uri(self) -> str:
        """The URI that names all three members."""
        return f"mongodb://{','.join(member.address for member in self.members)}/?replicaSet=rs0"

    def primary(self, deadline_s: float = 30.0) -> Mongod:
        """Wait for a primary among the members that run, and return it."""
        first, *others = self.members
        return first.wait_for_primary(*others, deadline_s=deadline_s)

    def secondaries(self) -> list[Mongod]:
        """Return the running members that are not the primary."""
        primary = self.primary()
        return [member for member in self.members if member.running and member is not primary]

    def heal(self) -> None:
        """Let all members run again, and wait for a primary."""
        for member in self.members:
            if not member.running:
                member.start()
        self.primary()

    def primary_goes(self, *, killed: bool) -> None:
        """Let all members run, then lose the primary: by SIGKILL, or by stepping down for some seconds."""
        self.heal()
        primary = self.primary()
        if killed:
            primary.kill()
            return
        with suppress(PyMongoError), replica.direct_client(primary.address) as client:  # it may close our connection
            client.admin.command("replSetStepDown", 5, secondaryCatchUpPeriodSecs=1, force=True)


@contextmanager
def three_nodes(directory: Path, parameters: Mapping[str, object] | None = None) -> Iterator[ThreeNodes]:
    """Run a replica set of three below `directory`; all are stopped at the end, suspended ones too."""
    with ExitStack() as stack:
        first, second, third = (small_mongod(directory / f"node{n}", parameters=parameters) for n in range(3))
        for member in (first, second, third):
            stack.enter_context(member)
        first.initiate(second, third, settings=QUICK_ELECTIONS)
        # Until its first copy of the data is complete, a member neither votes nor can be elected.
        wait_until(lambda: all(member.serves_reads for member in (first, second, third)), 60.0)
        yield ThreeNodes((first, second, third))
