"""The wire between a mesh under test and its server: it passes messages on, and can lose the reply to one of them.

In a thread of its own, with an event loop of its own: a test may block its loop. The server has acted by the time that its reply
is lost; the client meets a connection that was cut, as by a network that failed just then.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl, urlencode, urlsplit

_HEADER = struct.Struct("<iiii")
_OP_MSG = 2013
_NAME_AT = _HEADER.size + 4 + 1 + 4 + 1
"""Behind header and flags, the kind of the section, the document's length and the type of its first field: the command's name."""


@dataclass(eq=False)
class LostReply:
    """The next reply to a command of this name is lost."""

    command: str
    under_way: bool = False
    lost: bool = False


wanted: list[LostReply] = []
"""What is asked for by tests of this process."""


def can_lead_through(uri: str) -> bool:
    """Whether a client of this URI can be led through a wire: one server, named, without TLS."""
    parts = urlsplit(uri)
    options = {name.lower(): value.lower() for name, value in parse_qsl(parts.query)}
    secure = "true" in (options.get("tls"), options.get("ssl"))
    return parts.scheme == "mongodb" and "," not in parts.netloc and "%2f" not in parts.netloc.lower() and not secure


class Wire:
    """A wire to the server of a URI; a context manager."""

    open: set[Wire] = set()  # noqa: RUF012 — all of this process
    """The wires that there are."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        login, _, address = parts.netloc.rpartition("@")
        host, _, port = address.rpartition(":") if ":" in address.rpartition("]")[2] else (address, "", "27017")
        self._host, self._port = host.strip("[]"), int(port)
        self._login, self._parts = login, parts
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="taskmesh.testing wire", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._here = 0

    @property
    def uri(self) -> str:
        """The URI that leads through it."""
        kept = [(k, v) for k, v in parse_qsl(self._parts.query) if k.lower() not in ("replicaset", "directconnection")]
        query = urlencode([*kept, ("directConnection", "true")])
        login = f"{self._login}@" if self._login else ""
        return f"mongodb://{login}127.0.0.1:{self._here}{self._parts.path or '/'}?{query}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._listening.wait(10.0)
        Wire.open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Wire.open.discard(self)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self._here = server.sockets[0].getsockname()[1]
        self._listening.set()
        self._loop.run_forever()
        server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        if left := asyncio.all_tasks(self._loop):  # each ends by itself, now that its connection is cut
            self._loop.run_until_complete(asyncio.wait(left, timeout=5.0))
        self._loop.close()

    async def _accept(self, reads: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            server_reads, server = await asyncio.open_connection(self._host, self._port)
        except OSError:  # the server is down
            client.transport.abort()
            return
        ends = {client, server}
        self._writers |= ends
        lost: dict[int, LostReply] = {}
        directions = [
            asyncio.ensure_future(_to_server(reads, server, lost)),
            asyncio.ensure_future(_to_client(server_reads, client, lost)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.transport.abort()
        await asyncio.gather(*directions, return_exceptions=True)
        self._writers -= ends


async def _to_server(reads: asyncio.StreamReader, server: asyncio.StreamWriter, lost: dict[int, LostReply]) -> None:
    while message := await _next_message(reads):
        if wanted:
            command = _command_of(message)
            for reply in wanted:
                if reply.command == command and not reply.under_way:
                    reply.under_way = True
                    lost[_HEADER.unpack_from(message)[1]] = reply
                    break
        server.write(message)
        await server.drain()


async def _to_client(reads: asyncio.StreamReader, client: asyncio.StreamWriter, lost: dict[int, LostReply]) -> None:
    while message := await _next_message(reads):
        if (reply := lost.get(_HEADER.unpack_from(message)[2])) is not None:
            reply.lost = True
            return
        client.write(message)
        await client.drain()


async def _next_message(reads: asyncio.StreamReader) -> bytes:
    """Return the next whole message, or nothing at the end."""
    try:
        header = await reads.readexactly(_HEADER.size)
        return header + await reads.readexactly(_HEADER.unpack(header)[0] - _HEADER.size)
    except (asyncio.IncompleteReadError, OSError):
        return b""


def _command_of(message: bytes) -> str:
    """Return the name of the command in a message."""
    if _HEADER.unpack_from(message)[3] != _OP_MSG:
        return ""
    return message[_NAME_AT : message.index(b"\0", _NAME_AT)].decode()
