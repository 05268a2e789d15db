"""With any part of the rule broken, the checker names the promise that does not hold any more."""

from __future__ import annotations

import pytest

from taskmesh.store import rules
from tests.exhaustive.conftest import Explore
from tests.exhaustive.explorer import Model
from tests.processes.broken import BROKEN

_ONE = Model(1, 2, 3)
_TWO = Model(2, 1, 3)


SABOTAGE: dict[str, tuple[str, Model]] = {
    "gate unfinished": ("G4", Model(1, 1, 1, cancelled=True)),
    "gate unexpired": ("G2", Model(1, 1, 2, expires=1)),
    "gate started": ("G1", Model(1, 1, 2, starts=1)),
    "gate room": ("C1", _TWO),
    "gate retries left": ("B1", Model(1, 2, 2, option={"max_unexpected_retries": 0})),
    "gate timeouts left": ("B2", Model(1, 2, 3, option={"max_timeouts": 0})),
    "gate delay asked for": ("G1", Model(1, 2, 1, snoozed=True)),
    "gate worker allowed": ("G3", Model(2, 1, 1, option={"specific_worker_ids": ("w1",)})),
    "gate labels": ("G3", Model(1, 1, 1, needs={"gpu": True})),
    "gate not twice": ("C2", Model(1, 2, 1, option={"concurrent_worker_cnt": 2})),
    "gate retry delay": ("G5", _ONE),
    "fencing by lease": ("F1", _ONE),
    "fencing by execution": ("F1", _TWO),
    "fencing of pings": ("F1", _ONE),
    "release: charged": ("R1", _ONE),
    "release: entry kept": ("R1", _ONE),
    "count of losses": ("R2", _ONE),
    "derivation": ("D1", _ONE),
}


def test_every_gate_is_broken_once() -> None:
    # In no model a task waits for others, or for a signal: mutants break these gates, see tests/properties/mutants.py.
    gates = {*rules.task_gates("now"), *rules.worker_gates("w1")} - {"dependencies", "flow", "suspended", "sequence"}
    assert {name.removeprefix("gate ") for name in SABOTAGE if name.startswith("gate ")} == gates


@pytest.mark.slow
@pytest.mark.parametrize("broken", SABOTAGE)
async def test_what_is_broken_is_found(explore: Explore, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    promise, model = SABOTAGE[broken]
    BROKEN[broken](monkeypatch.setattr)

    found = await explore(model, until_broken=promise)

    assert promise in found.findings.broken, [str(violation) for violation in found.findings.violations[:3]]


@pytest.mark.slow
async def test_and_nothing_is_found_where_nothing_is_broken(explore: Explore) -> None:
    """So what is found is due to the patches alone."""
    for model in {id(model): model for _, model in SABOTAGE.values()}.values():
        found = await explore(model)
        assert [str(violation) for violation in found.findings.violations[:3]] == []
