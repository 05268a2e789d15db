"""The tests of the rule have teeth: the engine is broken in one place after another, and each time they find it out."""

from __future__ import annotations

import os
from itertools import chain

import pytest

from taskmesh.store import finish, rules
from tests.properties import machine, mutants, oracle, test_claim_rule
from tests.properties.mutation import Mutant
from tests.properties.shelf import Shelf
from tests.properties.world import Difference

_WORLDS = 3
_OPERATIONS = int(os.environ.get("OPERATIONS", "40000"))
"""Enough for the most hidden; most are found among the first hundred."""

MUTANTS = dict(
    chain(
        *(mutants.gates(), mutants.facts(), mutants.derived(), mutants.places()),
        *(mutants.guards(), mutants.verbs(), mutants.records(), mutants.asked()),
        *(mutants.stages(), mutants.lines()),
    )
)
LINKS = dict(mutants.links())


@pytest.mark.slow
@pytest.mark.blocks_the_loop  # as in the state machine's own test
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
async def test_the_state_machine_finds_out(
    mongo_uri: str, database: str, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    for module in (rules, oracle):
        monkeypatch.setattr(module, "KEPT_FAILS", 1)
        monkeypatch.setattr(module, "KEPT_LOSSES", 2)
    for module in (finish, oracle):
        monkeypatch.setattr(module, "KEPT_STAGES", 3)
    async with machine.worlds(mongo_uri, database, _WORLDS) as worlds:
        mutant(monkeypatch)
        with pytest.raises(Difference):
            await machine.drive(worlds, "mutants", _OPERATIONS, explained=False)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", LINKS.values(), ids=LINKS.keys())
async def test_random_documents_find_out(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """What concerns several tasks, which the state machine's worlds do not have."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        await _compared(shelf)


async def _compared(shelf: Shelf) -> None:
    await test_claim_rule.test_t11_when_a_worker_may_claim_is_what_the_oracle_says(shelf)
    shelf.later(0)
    await test_claim_rule.test_the_derived_fields_follow_from_the_entries(shelf)
    await test_claim_rule.test_what_is_begun_anew_is_asked_about_and_stands_in_line_again(shelf)
    await test_claim_rule.test_what_is_finished_leaves_its_line_unless_it_blocks_it(shelf)
