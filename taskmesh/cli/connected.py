"""Where a command connects to: `--uri`, `--database`, `--collection`, on every command that needs a mesh."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints
from urllib.parse import parse_qs, urlsplit

import typer

from taskmesh.cli.loading import load_mesh
from taskmesh.errors import TaskMeshError
from taskmesh.mesh import TaskMesh

P = ParamSpec("P")

_WHERE = "Where"
Uri = Annotated[
    str | None,
    typer.Option(
        envvar="TASKMESH_URI", help="MongoDB URI; none: the embedded MongoDB of this directory.", rich_help_panel=_WHERE
    ),
]
Database = Annotated[str | None, typer.Option(envvar="TASKMESH_DATABASE", help="Its database.", rich_help_panel=_WHERE)]
Collection = Annotated[
    str | None, typer.Option(envvar="TASKMESH_COLLECTION", help="Its collection of tasks.", rich_help_panel=_WHERE)
]

DEFAULT_DATABASE = "taskmesh"
DEFAULT_COLLECTION = "tasks"
_PATIENCE_MS = 10_000
"""How long a command waits for a server. The driver's own 30 s are for services; somebody watches this."""


def mesh_at(uri: str | None, database: str | None, collection: str | None, patience_ms: int = _PATIENCE_MS) -> TaskMesh:
    """Return a mesh without definitions at that place."""
    return TaskMesh(
        uri and patient_for(uri, patience_ms),
        database=database or DEFAULT_DATABASE,
        collection=collection or DEFAULT_COLLECTION,
    )


def patient_for(uri: str, patience_ms: int) -> str:
    """Return the URI with a limit on the search for a server, unless it has one. Raises `TaskMeshError`."""
    if not uri.startswith(("mongodb://", "mongodb+srv://")):
        raise TaskMeshError("this is no MongoDB URI; one looks like mongodb://127.0.0.1:27017/?replicaSet=rs0")
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri  # the driver says what is wrong with it
    if "serverselectiontimeoutms" in {name.lower() for name in parse_qs(parts.query)}:
        return uri
    setting = f"serverSelectionTimeoutMS={patience_ms}"
    query = f"{parts.query}&{setting}" if parts.query else setting
    return parts._replace(query=query, path=parts.path or "/").geturl()


def run_at(
    uri: str | None,
    database: str | None,
    collection: str | None,
    use: Callable[[TaskMesh], Awaitable[None]],
    *,
    app: str | None = None,
) -> None:
    """Connect a mesh at that place, use it, and close it. `app`: MODULE:MESH, whose definitions it shall have."""
    if app is None:
        mesh = mesh_at(uri, database, collection)
    else:
        mesh = load_mesh(app)
        mesh.connect_to(uri and patient_for(uri, _PATIENCE_MS), database=database, collection=collection)

    async def connect_and_use() -> None:
        async with mesh:
            await use(mesh)

    asyncio.run(connect_and_use())


def connected(command: Callable[Concatenate[TaskMesh, P], Awaitable[None]]) -> Callable[..., None]:
    """Make a command of a coroutine function: its first argument, a connected mesh, becomes the three options."""

    def run(*, uri: str | None, database: str | None, collection: str | None, **arguments: Any) -> None:
        # typer hands over what the signature asks for
        run_at(uri, database, collection, lambda mesh: command(mesh, **arguments))  # type: ignore[call-arg]

    return with_options(run, command, {"uri": Uri, "database": Database, "collection": Collection}, leave_out=1)


def with_options(
    run: Callable[..., None], like: Callable[..., Any], options: dict[str, Any], *, leave_out: int = 0
) -> Callable[..., None]:
    """Give `run` the name, text and parameters of `like`, without its first few, and with these options added."""
    hints = get_type_hints(like, include_extras=True)
    taken = list(inspect.signature(like).parameters.values())[leave_out:]
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in taken]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    run.__name__, run.__doc__ = like.__name__, like.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `inspect` looks at first
    return run
