"""Only the store knows the driver: elsewhere nothing of it is imported but its errors, and its codes are named once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import taskmesh

_ROOT = Path(taskmesh.__file__).parent
_DRIVERS = ("pymongo", "bson", "motor", "gridfs")
_OF_ITS_OWN_SERVER = "embedded"
"""Starts and initiates a mongod of its own, before there is a store."""
_PUBLIC = ("pymongo.errors",)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _outside() -> Iterator[Path]:
    for path in _ROOT.rglob("*.py"):
        rooms = path.relative_to(_ROOT).parts[:-1]
        if "store" not in rooms and _OF_ITS_OWN_SERVER not in rooms:
            yield path


def test_nothing_of_the_driver_but_its_errors_is_imported_outside_of_the_store() -> None:
    found = [
        f"{path.relative_to(_ROOT)}: {module}"
        for path in _outside()
        for module in _imported(path)
        if module.partition(".")[0] in _DRIVERS and module not in _PUBLIC
    ]
    assert found == []


def test_error_codes_of_the_server_are_compared_nowhere_outside_of_the_store() -> None:
    found = [
        f"{path.relative_to(_ROOT)}:{node.lineno}"
        for path in _outside()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Attribute)
        and node.left.attr == "code"
        and isinstance(node.left.value, ast.Name)
        and node.left.value.id == "error"
    ]
    assert found == []
