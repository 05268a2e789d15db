"""Only the store knows the driver: elsewhere nothing but its errors is imported. It names all codes, and explains its stages."""

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


_STAGES = {f"${name}" for name in ("set", "match", "project", "group", "unwind", "replaceWith", "unset", "merge")} | {
    f"${name}" for name in ("count", "limit", "sort", "unionWith", "currentOp", "collStats", "indexStats")
}
_SAY_IT_THEMSELVES = {"$count", "$limit", "$sort"}
"""Behind a stage that is explained."""


def _unexplained(path: Path) -> Iterator[int]:
    """Lines of stages without a comment above them, or above the statement that they begin."""
    text = path.read_text()
    lines = text.splitlines()

    def explained(line: int) -> bool:
        return lines[line - 2].lstrip().startswith("#")

    tree = ast.parse(text)
    statement = {part: outer for outer in ast.walk(tree) if isinstance(outer, ast.stmt) for part in ast.walk(outer)}
    for pipeline in ast.walk(tree):
        if not isinstance(pipeline, ast.List):
            continue
        before = explained(statement[pipeline].lineno)
        for element in pipeline.elts:
            if isinstance(element, ast.Dict) and len(element.keys) == 1 and isinstance(element.keys[0], ast.Constant):
                name = element.keys[0].value
                if name in _STAGES:
                    first = element is pipeline.elts[0]
                    before = explained(element.lineno) or (before and (first or name in _SAY_IT_THEMSELVES))
                    if not before:
                        yield element.lineno


def test_every_stage_of_a_pipeline_says_what_it_does() -> None:
    rooms = (_ROOT / "store", _ROOT / "admin" / "store")
    found = [
        f"{path.relative_to(_ROOT)}:{line}"
        for room in rooms
        for path in room.rglob("*.py")
        for line in _unexplained(path)
    ]
    assert found == []
