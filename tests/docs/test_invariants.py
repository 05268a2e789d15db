"""docs/invariants.md names every invariant of the checker; the code that holds it and the tests that attack it are there."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from taskmesh.store import rules
from tests.chaos.invariants import INVARIANTS
from tests.docs.examples import ROOT
from tests.docs.tables import Row, table

ROWS = table("docs/invariants.md", "", "promise", "held by", "attacked by")
DURABLE = table("docs/invariants.md", "", "of durable work", "held by", "attacked by")
TRAPS = table("docs/reliability.md", "trap", "what goes wrong", "test")
_REFERENCE = re.compile(r"`([^`]+)`")
_GATE = re.compile(r"\*([^*]+)\*")


def test_every_invariant_has_its_row_and_every_row_its_invariant() -> None:
    assert [row[""] for row in ROWS] == list(INVARIANTS)


@pytest.mark.parametrize("row", [*ROWS, *DURABLE], ids=lambda row: row[""])
def test_what_holds_it_is_there(row: Row) -> None:
    references = [name for name in _REFERENCE.findall(row["held by"]) if "." in name]
    assert references or re.match(r"[A-Z]\d", row["held by"]), "it names code, or another invariant"
    for reference in references:
        assert _found(f"taskmesh.{reference}") is not None, reference
    gates = {*rules.task_gates("now"), *rules.worker_gates("w1"), *rules.queue_gate(["q"])}
    assert set(_GATE.findall(row["held by"])) <= gates


@pytest.mark.parametrize("row", [*ROWS, *DURABLE], ids=lambda row: row[""])
def test_what_attacks_it_is_there(row: Row) -> None:
    _check_tests(_REFERENCE.findall(row["attacked by"]))


@pytest.mark.parametrize("row", TRAPS, ids=lambda row: row["trap"])
def test_every_known_trap_has_a_test_that_bears_its_name(row: Row) -> None:
    references = _REFERENCE.findall(row["test"])
    _check_tests(references)
    assert all(f"test_{row['trap'].lower()}_" in reference for reference in references)


def _check_tests(references: list[str]) -> None:
    assert references
    for reference in references:
        file, _, test = reference.partition("::")
        text = (ROOT / "tests" / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), reference


def _found(path: str) -> Any:
    """What a dotted path leads to: a module as far as it goes, then attributes."""
    module, _, names = path, "", ""
    while True:
        try:
            found: Any = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names = f"{name}.{names}" if names else name
    for name in filter(None, names.split(".")):
        found = getattr(found, name, None)
    return found
