"""A TCP proxy in front of a `mongod`, for faults of the network. It reads the messages it passes on: it can lose a reply.

`Proxy` runs in a thread with an event loop of its own; what a test calls may be called from any thread. `ProxyProcess` is the
same in a process of its own, for runs in which much goes through it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_REFUSED_AFTER_S = 0.2
_READINGS = 3
"""So that those who are shut out do not come again at once, for ever."""
_HEADER = struct.Struct("<iiii")
_OP_MSG = 2013
_BSON_KEY_AT = 16 + 4 + 1 + 4 + 1
"""In an OP_MSG: header, flags, kind of section, length of the document, type of its first field."""


class _Link:
    """One connection of a client, and ours to the server for it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.doomed: set[int] = set()
        """Requests whose replies are not to arrive."""

    def cut(self) -> None:
        for end in (self.client, self.server):
            raw = end.get_extra_info("socket")
            if raw is not None:
                with suppress(OSError):  # a reset, as when a machine is gone, and not an orderly end
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end.transport is not None:
                end.transport.abort()


@dataclass
class _Doom:
    """So many replies to these commands are to be lost."""

    commands: frozenset[str]
    left: int


class Proxy:
    """Listens on a port of its own for a server that listens on another."""

    def __init__(self, port: int | None = None) -> None:
        self.port = 0
        self._server_port = port
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._flows: asyncio.Event | None = None
        self._listener: asyncio.Server | None = None
        self._delay_s = 0.0
        self._refuses = False
        self._shut_out: frozenset[int] = frozenset()
        self._doomed: list[_Doom] = []
        self.lost_replies = 0
        """How many replies were lost on purpose."""
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def start(self) -> Self:
        """Listen."""
        self._thread.start()
        assert self._listening.wait(10.0)
        return self

    def leads_to(self, port: int) -> None:
        """Set where the server listens."""
        self._server_port = port

    # --- faults ---

    def cut(self) -> None:
        """Reset every connection. New ones are let in."""
        self._now(self._cut_all)

    def refuse(self, refuses: bool) -> None:
        """Reset every connection, and each new one, until told otherwise."""
        self._refuses = refuses
        if refuses:
            self.cut()

    def shut_out(self, pids: Iterable[int]) -> None:
        """Reset every connection of these processes, and each new one, until told otherwise: they are elsewhere."""
        self._shut_out = frozenset(pids)
        self._now(self._cut_those_shut_out)

    def hang(self, hangs: bool) -> None:
        """Let nothing through in either direction, though connections stay open, until told otherwise."""
        assert self._flows is not None
        self._now(self._flows.clear if hangs else self._flows.set)

    def slow(self, delay_s: float) -> None:
        """Hold every message up for so long; 0: no longer."""
        self._delay_s = delay_s

    def lose_replies(self, commands: str | Iterable[str], count: int = 1) -> None:
        """Let the server do what the next commands of these names say, and cut the connection instead of the reply."""
        names = frozenset([commands] if isinstance(commands, str) else commands)
        self._doomed = [*(doom for doom in self._doomed if doom.left), _Doom(names, count)]

    def heal(self) -> None:
        """Be a wire again."""
        self._doomed = []
        self.slow(0.0)
        self.shut_out(())
        self.refuse(False)
        self.hang(False)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    # --- the thread ---

    def _now(self, call: Callable[[], object]) -> None:
        """Call it in the loop, and wait until that is done: who goes on meets what it has changed."""
        done = threading.Event()

        def called() -> None:
            call()
            self._loop.call_soon(done.set)  # after what the call itself has put off: an aborted connection closes then

        self._loop.call_soon_threadsafe(called)
        done.wait(5.0)  # not for ever, should the thread have ended

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        assert self._flows is not None
        assert self._listener is not None
        self._listener.close()
        self._refuses = True
        self._flows.set()
        self._cut_all()
        handling = asyncio.all_tasks() - {asyncio.current_task()}
        if handling:  # each ends by itself, now that its connection is cut
            await asyncio.wait(handling, timeout=5.0)

    async def _listen(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        self._listening.set()

    def _cut_all(self) -> None:
        for link in tuple(self._links):
            link.cut()

    def _cut_those_shut_out(self) -> None:
        ports = _ports_of(self._shut_out)  # once for all: it takes a tenth of a second where there are many connections
        for link in tuple(self._links):
            if _port_of(link.client) in ports:
                link.cut()

    async def _accept(self, client_reads: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._refuses or (self._shut_out and _port_of(client) in _ports_of(self._shut_out)):
            if self._shut_out:
                await asyncio.sleep(_REFUSED_AFTER_S)
            client.transport.abort()
            return
        try:
            server_reads, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # the server is down
            client.transport.abort()
            return
        link = _Link(client, server)
        self._links.add(link)
        try:
            await self._until_one_ends(self._to_server(link, client_reads), self._to_client(link, server_reads))
        finally:
            self._links.discard(link)
            link.cut()

    @staticmethod
    async def _until_one_ends(*directions: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.ensure_future(direction) for direction in directions]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _to_server(self, link: _Link, reads: asyncio.StreamReader) -> None:
        while message := await _next_message(reads):
            self._doom(link, message)
            await self._pass(link.server, message)

    async def _to_client(self, link: _Link, reads: asyncio.StreamReader) -> None:
        while message := await _next_message(reads):
            responds_to = _HEADER.unpack_from(message)[2]
            if responds_to in link.doomed:
                self.lost_replies += 1
                return
            await self._pass(link.client, message)

    async def _pass(self, end: asyncio.StreamWriter, message: bytes) -> None:
        assert self._flows is not None
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        await self._flows.wait()
        end.write(message)
        await end.drain()

    def _doom(self, link: _Link, message: bytes) -> None:
        if not self._doomed:
            return
        command = _command_of(message)
        for doom in self._doomed:
            if doom.left and command in doom.commands:
                doom.left -= 1
                link.doomed.add(_HEADER.unpack_from(message)[1])
                return


class ProxyProcess:
    """A `Proxy` in a child process, with the same calls."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.proxy"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.port: int = self._call("start")["port"]

    def leads_to(self, port: int) -> None:
        """Set where the server listens."""
        self._call("leads_to", port)

    def cut(self) -> None:
        """See `Proxy.cut`."""
        self._call("cut")

    def refuse(self, refuses: bool) -> None:
        """See `Proxy.refuse`."""
        self._call("refuse", refuses)

    def shut_out(self, pids: Iterable[int]) -> None:
        """See `Proxy.shut_out`."""
        self._call("shut_out", list(pids))

    def hang(self, hangs: bool) -> None:
        """See `Proxy.hang`."""
        self._call("hang", hangs)

    def slow(self, delay_s: float) -> None:
        """See `Proxy.slow`."""
        self._call("slow", delay_s)

    def lose_replies(self, command: str, count: int = 1) -> None:
        """See `Proxy.lose_replies`."""
        self._call("lose_replies", command, count)

    def heal(self) -> None:
        """See `Proxy.heal`."""
        self._call("heal")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _call(self, name: str, *arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _obey() -> None:
    """Do what comes on standard input, a call per line, until it ends."""
    with suppress(KeyboardInterrupt):
        proxy = Proxy()
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            getattr(proxy, name)(*arguments)
            sys.stdout.write(json.dumps({"port": proxy.port, "lost_replies": proxy.lost_replies}) + "\n")
            sys.stdout.flush()


def _port_of(client: asyncio.StreamWriter) -> int | None:
    """From which port a client has connected; None if it is gone."""
    peer = client.get_extra_info("peername")
    return None if peer is None else int(peer[1])


def _ports_of(pids: Iterable[int]) -> set[int]:
    """From which ports these processes have connected (Linux; by hand, since it must not hold up all others)."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):  # it has gone
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(str(file.readlink()))
    ports = set()
    for _ in range(_READINGS):
        # Rows of connections that are over have no socket. A row can be missing while others come and go beside it.
        for port, row in re.findall(rb": 0100007F:([0-9A-F]{4}) (.*)", Path("/proc/net/tcp").read_bytes()):
            if f"socket:[{row.split()[7].decode()}]" in sockets:
                ports.add(int(port, 16))
    return ports


async def _next_message(reads: asyncio.StreamReader) -> bytes:
    """Return the next whole message, or nothing at the end."""
    try:
        header = await reads.readexactly(_HEADER.size)
        return header + await reads.readexactly(_HEADER.unpack(header)[0] - _HEADER.size)
    except (asyncio.IncompleteReadError, OSError):
        return b""


def _command_of(message: bytes) -> str:
    """Return the name of the command in a message, which is its first field."""
    if _HEADER.unpack_from(message)[3] != _OP_MSG:
        return ""
    return message[_BSON_KEY_AT : message.index(b"\0", _BSON_KEY_AT)].decode()


if __name__ == "__main__":
    _obey()
