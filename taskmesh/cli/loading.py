"""MODULE:MESH: importing the user's code, and saying clearly what is wrong with it."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

import typer

import taskmesh
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import TaskMeshError

_TASKMESH = str(Path(taskmesh.__file__).parent)


class CannotLoad(TaskMeshError):
    """The user's module, or the mesh in it, cannot be used. Trying again changes nothing."""


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
    """Return the mesh that MODULE:MESH names; the current directory is looked through first.

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
        raise CannotLoad(f"{target!r} is a {type(found).__name__}, no TaskMesh; {_meshes_in(module_name)}")
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
    """Tell where the import failed: the frames below importlib's, which are the user's.

    An error that taskmesh raised on purpose is a sentence, and one line of the user's is where it was asked for.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    if isinstance(error, TaskMeshError) and (users := [frame for frame in own if _TASKMESH not in frame.filename]):
        place = f"{users[-1].filename}, line {users[-1].lineno}"
        return CannotLoad(f"importing {module_name!r} failed: {error} ({place})")
    where = "".join(traceback.format_list(own) + traceback.format_exception_only(error)).rstrip()
    return CannotLoad(f"importing {module_name!r} failed:\n{where}")
