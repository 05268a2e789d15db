"""The tests of the rule have teeth: the engine is broken in one place after another, and each time they find it out."""

from __future__ import annotations

import os
from itertools import chain

import pytest

from taskmesh.store import rules
from tests.properties import machine, mutants, oracle
from tests.properties.mutation import Mutant
from tests.properties.world import Difference

_WORLDS = 3
_OPERATIONS = int(os.environ.get("OPERATIONS", "8000"))
"""Enough for the most hidden; most are found among the first hundred."""

MUTANTS = dict(
    chain(
        *(mutants.gates(), mutants.facts(), mutants.derived(), mutants.places()),
        *(mutants.guards(), mutants.verbs(), mutants.records()),
    )
)


@pytest.mark.slow
@pytest.mark.blocks_the_loop  # as in the state machine's own test
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
async def test_the_state_machine_finds_out(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    for module in (rules, oracle):
        monkeypatch.setattr(module, "KEPT_FAILS", 1)
        monkeypatch.setattr(module, "KEPT_LOSSES", 2)
    async with machine.worlds(mongo_uri, database, _WORLDS) as worlds:
        mutant(monkeypatch)
        with pytest.raises(Difference):
            await machine.drive(worlds, "mutants", _OPERATIONS, explained=False)
