"""The distribution: its version, its name where it is installed, and how to install one of its extras.

The import name is not the distribution's name: an unrelated package is published as `taskmesh`. So only the metadata of this
installation says what to ask pip for; every message asks here. It is read only for such a message, since that takes a look at
each installed package.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import Distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from taskmesh.model.errors import ExtraMissing

VERSION = "0.1.0"
"""The version. pyproject.toml takes it from here."""

_IF_NOT_INSTALLED = "taskmesh-mongodb"
"""The name in pyproject.toml, for a source tree that is only on the path."""


@cache
def _installed() -> Distribution | None:
    """Return the distribution whose command is ours. An unrelated `taskmesh` has another entry point."""
    commands = entry_points(group="console_scripts", name="taskmesh")
    return next((command.dist for command in commands if command.value == "taskmesh.cli:main"), None)


def name() -> str:
    """Return the name by which pip knows this distribution."""
    found = _installed()
    return _IF_NOT_INSTALLED if found is None else found.name


def install(extra: str) -> str:
    """Return the command that adds an extra to this installation, from where it was installed: a clone, or an index."""
    clone = _clone()
    if clone is None:
        return f"pip install '{name()}[{extra}]'"
    directory, editable = clone
    return f"pip install {'--editable ' if editable else ''}'{directory}[{extra}]'"


def check_extra(extra: str, modules: tuple[str, ...], what: str) -> None:
    """Raise `ExtraMissing` unless these modules can be imported. `what`: what needs them, as the subject of a sentence."""
    if missing := [module for module in modules if find_spec(module) is None]:
        raise ExtraMissing(f"{what} needs {' and '.join(missing)}: {install(extra)}")


@cache
def _clone() -> tuple[Path, bool] | None:
    """Return the directory from which this was installed, and whether it is editable. None: it came from elsewhere."""
    found = _installed()
    text = None if found is None else found.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    url = urlsplit(origin["url"])
    directory = Path(unquote(url.path))
    if url.scheme != "file" or "dir_info" not in origin or not directory.is_dir():
        return None
    return directory, bool(origin["dir_info"].get("editable"))
