"""A replica set of three real servers, each behind a proxy: what clients and the members themselves reach of it can break."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pymongo.errors import PyMongoError

from taskmesh.embedded import replica
from tests.chaos.proxy import ProxyProcess
from tests.mongod import Mongod
from tests.mongods import QUICK_ELECTIONS, small_mongod
from tests.waiting import wait_until


@dataclass(frozen=True)
class Cluster:
    """The servers and their proxies, in the same order."""

    members: tuple[Mongod, ...]
    proxies: tuple[ProxyProcess, ...]

    @property
    def uri(self) -> str:
        """The URI that names all members by their proxies."""
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies)
        return f"mongodb://{hosts}/?replicaSet=rs0"

    def primary(self, deadline_s: float = 60.0) -> int:
        """Wait for a primary, and return which member it is."""

        def found() -> list[int]:
            return [i for i, member in enumerate(self.members) if member.running and _is_primary(member)]

        return wait_until(found, deadline_s, what="there is a primary")[0]

    def step_down(self, seconds: int = 3) -> None:
        """Let the primary give up its place."""
        member = self.members[self.primary()]
        with suppress(PyMongoError), replica.direct_client(member.address) as client:  # it may close our connection
            client.admin.command("replSetStepDown", seconds, secondaryCatchUpPeriodSecs=1, force=True)

    def divide(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Let none of these processes, by their ids, reach a member that is one of the others, nor the other way round."""
        for member, proxy in zip(self.members, self.proxies, strict=True):
            proxy.shut_out(others if member.pid in some else some)

    def heal(self) -> None:
        """Start, resume and reconnect everything, and wait until the set is whole."""
        for member, proxy in zip(self.members, self.proxies, strict=True):
            proxy.heal()
            if member.running:
                member.resume()
            else:
                member.start()
        self.primary()
        wait_until(lambda: all(member.serves_reads for member in self.members), 90.0, what="every member is there")


def _is_primary(member: Mongod) -> bool:
    return replica.is_primary(member.address)


@contextmanager
def cluster(
    directory: Path,
    clocks_s: Sequence[float] = (0.0, 0.0, 0.0),
    settings: Mapping[str, object] = QUICK_ELECTIONS,
    parameters: Mapping[str, object] | None = None,
) -> Iterator[Cluster]:
    """Run a replica set of servers behind proxies below `directory`. `clocks_s`: how far the clock of each is off."""
    with ExitStack() as stack:
        members = tuple(
            small_mongod(directory / f"node{n}", clock_s=clock_s, parameters=parameters)
            for n, clock_s in enumerate(clocks_s)
        )
        proxies = tuple(stack.enter_context(ProxyProcess()) for _ in members)
        for member, proxy in zip(members, proxies, strict=True):
            stack.enter_context(member)
            proxy.leads_to(member.port)
        addresses = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
        replica.ensure_replica_set(members[0].address, "rs0", addresses, settings)
        started = Cluster(members, proxies)
        wait_until(lambda: all(member.serves_reads for member in members), 60.0, what="every member has its data")
        yield started
        for member in members:
            if member.running:
                member.resume()
