"""Where a command connects: `--app`, `--uri`, `--database`, `--collection`, on every command that needs a mesh."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints
from urllib.parse import parse_qs, urlsplit

import typer

import taskmesh
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError, TaskNotFound
from taskmesh.store.payloads import concealed

P = ParamSpec("P")

_WHERE = "Where"
COMMAND_LINE_URI = "TASKMESH_COMMAND_LINE_URI"
"""The variable that passes on a `--uri` given before the command, or on a supervisor's command line.

In the environment, since it may hold a password; not as TASKMESH_URI, which a URI in the code overrides.
"""
Uri = Annotated[
    str | None,
    typer.Option(
        envvar=COMMAND_LINE_URI,
        show_envvar=False,
        help="MongoDB URI. Else the one in the code of MODULE:MESH, TASKMESH_URI, or the embedded MongoDB of this directory.",
        rich_help_panel=_WHERE,
    ),
]
Database = Annotated[str | None, typer.Option(envvar="TASKMESH_DATABASE", help="The database.", rich_help_panel=_WHERE)]
Collection = Annotated[
    str | None, typer.Option(envvar="TASKMESH_COLLECTION", help="The collection of tasks.", rich_help_panel=_WHERE)
]

App = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="MODULE:MESH",
        help="Connect where this mesh does, with its definitions.",
        rich_help_panel=_WHERE,
    ),
]

_PATIENCE_MS = 10_000
"""How long a command waits for a server. The driver's own 30 s suit services, not a person who waits."""


def patient_for(uri: str, patience_ms: int) -> str:
    """Return the URI with a timeout for finding a server, unless it has one. Raises `TaskMeshError`."""
    if not uri.startswith(("mongodb://", "mongodb+srv://")):
        raise TaskMeshError("not a MongoDB URI: one looks like mongodb://127.0.0.1:27017/?replicaSet=rs0")
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri  # the driver says what is wrong with it
    if "serverselectiontimeoutms" in {name.lower() for name in parse_qs(parts.query)}:
        return uri
    setting = f"serverSelectionTimeoutMS={patience_ms}"
    query = f"{parts.query}&{setting}" if parts.query else setting
    return parts._replace(query=query, path=parts.path or "/").geturl()


def mesh_of(
    app: str | None, uri: str | None, database: str | None, collection: str | None, patience_ms: int = _PATIENCE_MS
) -> TaskMesh:
    """Return the mesh that `app` names, or one without definitions, which connects to that place."""
    mesh = TaskMesh() if app is None else load_mesh(app)
    uri = uri or (None if mesh.connection.is_placed else os.environ.get("TASKMESH_URI"))
    mesh.connect_to(uri and patient_for(uri, patience_ms), database=database or None, collection=collection or None)
    return mesh


def run_at(mesh: TaskMesh, use: Callable[[TaskMesh], Awaitable[None]]) -> None:
    """Connect a mesh, use it, and close it. Creates collections and indexes only if a publication needs them."""

    async def connect_and_use() -> None:
        await mesh.connect(create=False)
        try:
            with concealed():
                await use(mesh)
        except TaskNotFound as error:  # it may well be somewhere else
            raise TaskNotFound(f"{error}; looked at {mesh.address}") from None
        finally:
            await mesh.close()

    asyncio.run(connect_and_use())


def connected(command: Callable[Concatenate[TaskMesh, P], Awaitable[None]]) -> Callable[..., None]:
    """Turn a coroutine function into a command: its first parameter, a connected mesh, is replaced by options that say where."""

    def run(
        *, app: str | None, uri: str | None, database: str | None, collection: str | None, **arguments: Any
    ) -> None:
        mesh = mesh_of(app, uri, database, collection)
        # typer hands over what the signature asks for
        run_at(mesh, lambda mesh: command(mesh, **arguments))  # type: ignore[call-arg]

    hints = get_type_hints(command, include_extras=True)
    _, *taken = inspect.signature(command).parameters.values()
    where = {"app": App, "uri": Uri, "database": Database, "collection": Collection}
    parameters = [parameter.replace(annotation=hints[parameter.name]) for parameter in taken]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in where.items()
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `inspect` looks at first
    return run


_TASKMESH = str(Path(taskmesh.__file__).parent)


class CannotLoad(TaskMeshError):
    """The user's module, or the mesh in it, cannot be used. Trying again does not help."""


def check_target(target: str) -> None:
    """Raise typer's `BadParameter` for what cannot be a MODULE:MESH."""
    module_name, _, path = target.partition(":")
    if not (module_name and path):
        raise typer.BadParameter(f"{target!r} is not of the form MODULE:MESH, like tasks:mesh")
    if "/" in module_name or "\\" in module_name or not all(module_name.split(".")):
        raise typer.BadParameter(
            f"{module_name!r} is a path, not the name of a module: start in the project's directory, and write the module with "
            "dots, like package.tasks:mesh"
        )


def load_mesh(target: str) -> TaskMesh:
    """Return the mesh that MODULE:MESH names; the current directory is searched first.

    Raises `CannotLoad`, with the traceback of the user's own code if that is where it failed.
    """
    check_target(target)
    module_name, _, path = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise CannotLoad(
                f"there is no module {error.name!r} in {here} or where Python looks for it: start in the project's "
                "directory, or install it"
            ) from None
        raise _failed(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _failed(module_name, error) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise CannotLoad(f"module {module_name!r} has no {path!r}; {_meshes_in(module_name)}")
        found = getattr(found, name)
    if not isinstance(found, TaskMesh):
        raise CannotLoad(f"{target!r} is a {type(found).__name__}, not a TaskMesh; {_meshes_in(module_name)}")
    if not found.definitions:
        raise CannotLoad(
            f"the mesh {target!r} defines no tasks: let {module_name!r} import the modules that define them"
        )
    return found


def _meshes_in(module_name: str) -> str:
    names = [name for name, value in vars(sys.modules[module_name]).items() if isinstance(value, TaskMesh)]
    if not names:
        return "there is no TaskMesh in that module"
    return f"what it has: {', '.join(f'{module_name}:{name}' for name in names)}"


def _failed(module_name: str, error: BaseException) -> CannotLoad:
    """Return the error of a failed import, with the user's own frames: those below importlib's.

    For an error that taskmesh raised on purpose, its message and the user's line that caused it are enough.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    if isinstance(error, TaskMeshError) and (users := [frame for frame in own if _TASKMESH not in frame.filename]):
        place = f"{users[-1].filename}, line {users[-1].lineno}"
        return CannotLoad(f"importing {module_name!r} failed: {error} ({place})")
    where = "".join(traceback.format_list(own) + traceback.format_exception_only(error)).rstrip()
    return CannotLoad(f"importing {module_name!r} failed:\n{where}")
