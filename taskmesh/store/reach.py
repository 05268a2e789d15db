"""Reaching the server for the first time; and if that fails, the sentence that says why, and what to do."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError, OperationFailure, PyMongoError

from taskmesh.model.errors import NotAReplicaSet, TaskMeshError
from taskmesh.store.mongodb.driver import Document, core_of, settings_of
from taskmesh.store.mongodb.server_errors import Code
from taskmesh.store.store import Store

_LOOK_S = 0.1
_DIRECTLY_MS = 2_000
_SRV = "mongodb+srv://"


async def hello(store: Store) -> Document:
    """Return the server's `hello`. Raises `TaskMeshError`, which says why there is none."""
    asking = asyncio.ensure_future(store.driver.admin({"hello": 1}))
    try:
        while not (await asyncio.wait([asking], timeout=_LOOK_S))[0]:
            # The driver drops a server of another replica set, and no longer looks for it: so we need not wait.
            if not _left(store) and (why := await _other_replica_set(store)) is not None:
                raise why
        return await asking
    except (OperationFailure, ConfigurationError) as error:
        raise _refused(store, error) from None
    except PyMongoError as error:
        why = await _other_replica_set(store) if not _left(store) else None
        raise why or TaskMeshError(
            f"no MongoDB answers at {hosts(store)}: start one, or correct the URI ({type(error).__name__})"
        ) from error
    finally:
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])


def hosts(store: Store) -> str:
    """Return the addresses in the client's URI, without credentials."""
    servers = _left(store) or core_of(store.driver.client)._topology_settings.seeds  # noqa: SLF001 — told nowhere else
    return ", ".join(sorted(host if port is None else f"{host}:{port}" for host, port in servers))


def _left(store: Store) -> list[tuple[str, int | None]]:
    """Return the servers that the driver still knows of."""
    return list(core_of(store.driver.client).topology_description.server_descriptions())


def _refused(store: Store, error: PyMongoError) -> TaskMeshError:
    """Return an error that says why the server, or the driver itself, has refused to answer."""
    if isinstance(error, ConfigurationError):
        uri = settings_of(store.driver.client).get("host")
        if isinstance(uri, str) and uri.startswith(_SRV):
            host = urlsplit(uri).hostname
            return TaskMeshError(f"the host {host!r} of the {_SRV} URI cannot be resolved: correct its name ({error})")
        return TaskMeshError(f"the MongoDB URI cannot be used: {error}")
    code = error.code if isinstance(error, OperationFailure) else None
    if code in (Code.AUTHENTICATION_FAILED, Code.ATLAS_ERROR):
        user = _user_of(store)
        return TaskMeshError(
            f"the MongoDB at {hosts(store)} refuses user {user!r} with this password: correct user, password or authSource "
            "in the URI"
        )
    if code == Code.UNAUTHORIZED:
        return TaskMeshError(
            f"the MongoDB at {hosts(store)} requires a user with access to database {store.driver.database.name!r}: put user, "
            "password and authSource into the URI"
        )
    return TaskMeshError(f"the MongoDB at {hosts(store)} refuses to answer: {said_by(error)}")


def _user_of(store: Store) -> str | None:
    uri = settings_of(store.driver.client).get("host")
    named = urlsplit(uri).username if isinstance(uri, str) else None
    return named or settings_of(store.driver.client).get("username")


async def _other_replica_set(store: Store) -> TaskMeshError | None:
    """Ask the first server in the URI what it is, and say so if it belongs to another replica set than was requested."""
    wished = core_of(store.driver.client)._topology_settings.replica_set_name  # noqa: SLF001 — told nowhere else
    uri = settings_of(store.driver.client).get("host")
    if wished is None or not isinstance(uri, str) or uri.startswith(_SRV):
        return None
    for seed in hosts(store).split(", "):
        client: Any = None
        try:
            client = AsyncMongoClient[Any](_directly(uri, seed), serverSelectionTimeoutMS=_DIRECTLY_MS)
            found = (await client.admin.command("hello")).get("setName")
        except PyMongoError:
            continue
        finally:
            if client is not None:
                await client.close()
        if found is None:
            return NotAReplicaSet(
                f"the MongoDB at {seed} is a standalone server, not a member of replica set {wished!r}: start it with "
                f"--replSet {wished} and run rs.initiate() once"
            )
        if found != wished:
            return TaskMeshError(
                f"the MongoDB at {seed} is a member of replica set {found!r}, not {wished!r}: write replicaSet={found} in the URI"
            )
    return None


def _directly(uri: str, seed: str) -> str:
    """Return a URI for this server alone, whatever set it belongs to. Without credentials: a `hello` needs none."""
    left_out = ("replicaset", "directconnection", "loadbalanced", "serverselectiontimeoutms")
    options = [
        (name, value)
        for name, value in parse_qsl(urlsplit(uri).query)
        if name.lower() not in left_out and not name.lower().startswith("auth")
    ]
    return f"mongodb://{seed}/?{urlencode([*options, ('directConnection', 'true')])}"


def said_by(error: PyMongoError) -> str:
    """Return the text of an error, without the server's reply, which the driver appends."""
    return str(error).partition(", full error: ")[0]
