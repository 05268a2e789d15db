"""Talking to a `mongod` that we started: does it answer, form its replica set, wait for a primary.

Blocking, with PyMongo's ordinary client: it runs before there is an event loop to block, or in a thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

ALREADY_INITIALIZED = 23
NOT_YET_INITIALIZED = 94
CONFIG_CHANGED_MEANWHILE = 103  # NewReplicaSetConfigurationIncompatible: another process was quicker

_POLL_S = 0.02


def direct_client(address: str, *, timeout_ms: int = 2_000) -> MongoClient[dict[str, Any]]:
    """Return a client of exactly this server ("host:port"), whatever its role. The caller closes it."""
    return MongoClient(
        f"mongodb://{address}/?directConnection=true",
        serverSelectionTimeoutMS=timeout_ms,
        connectTimeoutMS=timeout_ms,
        socketTimeoutMS=30_000,
    )


def wait_for(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Call `condition` about every 20 ms until it is true. Return whether it became true within `deadline_s`."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def dbpath_of(address: str) -> str | None:
    """Return the dbpath of the server that listens at `address`; `None` if nothing there speaks to us yet."""
    host, port = address.rsplit(":", 1)
    try:
        # The driver asks again only after half a second; a refused connection tells at once.
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except OSError:
        return None
    try:
        with direct_client(address, timeout_ms=500) as client:
            options = client.admin.command("getCmdLineOpts")
    except PyMongoError:
        return None
    path: str | None = options["parsed"].get("storage", {}).get("dbPath")
    return path


def is_primary(address: str) -> bool:
    """Tell whether the server at `address` is a primary that accepts writes now."""
    return bool(hello(address).get("isWritablePrimary"))


def hello(address: str) -> dict[str, Any]:
    """Return what the server at `address` says about itself; nothing if it does not answer."""
    try:
        with direct_client(address, timeout_ms=500) as client:
            return client.admin.command("hello")
    except PyMongoError:
        return {}


def ensure_replica_set(
    address: str, replica_set: str, members: Sequence[str], settings: Mapping[str, object] | None = None
) -> None:
    """Make the server at `address` ("host:port") a member of `replica_set`, which consists of `members`.

    `settings` are those of the replica set's configuration (`electionTimeoutMillis` and the like).

    Idempotent. Data of an earlier run remembers the port of that run, and a node that does not find itself in its
    own configuration waits for ever: the configuration is then replaced by force, which loses nothing on one node.

    Raises:
        PyMongoError: the server does not answer, or refuses.
    """
    wished = [{"_id": number, "host": member} for number, member in enumerate(members)]
    with direct_client(address) as client:
        try:
            config = client.admin.command("replSetGetConfig")["config"]
        except OperationFailure as error:
            if error.code != NOT_YET_INITIALIZED:
                raise
            created = {"_id": replica_set, "members": wished, "settings": dict(settings or {})}
            _tolerate(lambda: client.admin.command("replSetInitiate", created), ALREADY_INITIALIZED)
            return
        if [member["host"] for member in config["members"]] == list(members):
            return
        config["members"] = wished
        config["version"] += 1
        _tolerate(lambda: client.admin.command("replSetReconfig", config, force=True), CONFIG_CHANGED_MEANWHILE)


def _tolerate(call: Callable[[], object], code: int) -> None:
    try:
        call()
    except OperationFailure as error:
        if error.code != code:
            raise
