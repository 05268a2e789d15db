"""The database itself, for the command line and the web: whether it answers, and what its errors mean."""

from __future__ import annotations

from datetime import datetime

from taskmesh.client.connection import Connection
from taskmesh.store import registry
from taskmesh.store.mongodb.server_errors import is_passing
from taskmesh.store.reach import said_by

__all__ = ["is_passing", "said_by", "server_time"]


async def server_time(connection: Connection) -> datetime:
    """Return the server's time, the cheapest request there is. Raises `PyMongoError` if the server does not answer."""
    return await registry.server_time(connection.store)
