"""With any part of the rule broken, the checker names the promise that does not hold any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import rules
from taskmesh.store import claim, finish, lease
from tests.exhaustive.conftest import Explore
from tests.exhaustive.explorer import Model

Patch = Callable[[pytest.MonkeyPatch], None]
_ONE = Model(1, 2, 3)
_TWO = Model(2, 1, 3)


def _without_gate(gate: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = {"task_gates": rules.task_gates, "worker_gates": rules.worker_gates}
        assert any(gate in gates("w1") for gates in whole.values()), f"there is no gate {gate!r} to break"
        for name, gates in whole.items():
            monkeypatch.setattr(rules, name, _lacking(gates, gate))

    return patch


def _without_gate_and_status(gate: str) -> Patch:
    """Candidates are also chosen by their status, which alone would hold: so that is broken too."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        _without_gate(gate)(monkeypatch)
        monkeypatch.setattr(claim, "_candidates", lambda ids, _: {"_id": ids})

    return patch


def _lacking(gates: Callable[..., dict[str, Any]], gate: str) -> Callable[..., dict[str, Any]]:
    return lambda *arguments: {name: opens for name, opens in gates(*arguments).items() if name != gate}


def _any_lease_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes count though the lease is over."""

    def held(outcomes: list[finish.Outcome], _: Any) -> Any:
        running = {"$elemMatch": {"running_id": outcomes[0].running_id, "state": "RUNNING"}}
        return {"_id": {"$in": [outcome.id for outcome in outcomes]}, "task_state.worker_states": running}

    monkeypatch.setattr(finish, "_still_held_by", held)


def _whoever_runs_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are written by the task alone, as engines without a fencing token do."""
    monkeypatch.setattr(finish, "_still_held_by", lambda outcomes, _: {"_id": {"$in": [o.id for o in outcomes]}})
    monkeypatch.setattr(finish, "_held_entry", lambda _: {"$eq": ["$$this.state", "RUNNING"]})


def _pings_revive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is over is renewed."""
    monkeypatch.setattr(lease, "_is_mine", lambda ids, _: {"$in": ["$$this.running_id", {"$literal": ids}]})


def _releases_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = finish._given_back

    def charged(outcomes: list[finish.Outcome], now: Any) -> Any:
        count = {"$set": {"task_state.timeout_cnt": {"$add": ["$task_state.timeout_cnt", 1]}}}
        return [*given_back(outcomes, now), count]

    monkeypatch.setattr(finish, "_given_back", charged)


def _losses_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "counted_losses", dict)


def _nothing_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "derivation", lambda *_, **__: [])


SABOTAGE: dict[str, tuple[Patch, str, Model]] = {
    "gate unfinished": (_without_gate_and_status("unfinished"), "G4", Model(1, 1, 1, cancelled=True)),
    "gate unexpired": (_without_gate("unexpired"), "G2", Model(1, 1, 2, expires=1)),
    "gate started": (_without_gate("started"), "G1", Model(1, 1, 2, starts=1)),
    "gate room": (_without_gate("room"), "C1", _TWO),
    "gate retries left": (
        _without_gate_and_status("retries left"),
        "B1",
        Model(1, 2, 2, option={"max_unexpected_retries": 0}),
    ),
    "gate timeouts left": (_without_gate("timeouts left"), "B2", Model(1, 2, 3, option={"max_timeouts": 0})),
    "gate delay asked for": (_without_gate("delay asked for"), "G1", Model(1, 2, 1, snoozed=True)),
    "gate worker allowed": (
        _without_gate("worker allowed"),
        "G3",
        Model(2, 1, 1, option={"specific_worker_ids": ("w1",)}),
    ),
    "gate not twice": (_without_gate("not twice"), "C2", Model(1, 2, 1, option={"concurrent_worker_cnt": 2})),
    "gate retry delay": (_without_gate("retry delay"), "G5", _ONE),
    "fencing by lease": (_any_lease_will_do, "F1", _ONE),
    "fencing by execution": (_whoever_runs_it_has_ended, "F1", _TWO),
    "fencing of pings": (_pings_revive, "F1", _ONE),
    "release": (_releases_are_charged, "R1", _ONE),
    "count of losses": (_losses_are_not_counted, "R2", _ONE),
    "derivation": (_nothing_is_derived, "D1", _ONE),
}


def test_every_gate_is_broken_once() -> None:
    gates = {*rules.task_gates("now"), *rules.worker_gates("w1")}
    assert {name.removeprefix("gate ") for name in SABOTAGE if name.startswith("gate ")} == gates


@pytest.mark.slow
@pytest.mark.parametrize("broken", SABOTAGE)
async def test_what_is_broken_is_found(explore: Explore, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    patch, promise, model = SABOTAGE[broken]
    patch(monkeypatch)

    found = await explore(model, until_broken=promise)

    assert promise in found.findings.broken, [str(violation) for violation in found.findings.violations[:3]]


@pytest.mark.slow
async def test_and_nothing_is_found_where_nothing_is_broken(explore: Explore) -> None:
    """So what is found is due to the patches alone."""
    for model in {id(model): model for _, _, model in SABOTAGE.values()}.values():
        found = await explore(model)
        assert [str(violation) for violation in found.findings.violations[:3]] == []
