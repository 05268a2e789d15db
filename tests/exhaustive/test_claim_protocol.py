"""The claim protocol, exhaustively: in every state that it can reach, every write does what the rule says, and no more."""

from __future__ import annotations

import pytest

from tests.exhaustive.conftest import Explore
from tests.exhaustive.explorer import Explored, Model

MODELS = {
    "one place, two workers": Model(2, 1, 4, option={"max_unexpected_retries": 1, "max_timeouts": 1}),
}
LARGE_MODELS = {
    "two places, two workers, cancelled at any moment": Model(
        2, 1, 4, cancelled=True, option={"concurrent_worker_cnt": 2, "max_unexpected_retries": 0, "max_timeouts": 0}
    ),
    "one place, three workers": Model(3, 1, 5, option={"max_unexpected_retries": 1, "max_timeouts": 1}),
    "one place, two workers who come back": Model(2, 2, 5, option={"max_unexpected_retries": 2, "max_timeouts": 2}),
    "two places, three workers": Model(
        3, 1, 4, option={"concurrent_worker_cnt": 2, "max_unexpected_retries": 1, "max_timeouts": 1}
    ),
    "two places, two workers who come back, each with a delay of its own": Model(
        2,
        2,
        4,
        option={
            "concurrent_worker_cnt": 2,
            "max_unexpected_retries": 1,
            "max_timeouts": 1,
            "unexpected_retry_delay_scope": "worker",
        },
    ),
}


@pytest.mark.parametrize(
    "model",
    [
        *(pytest.param(model, id=name) for name, model in MODELS.items()),
        *(pytest.param(model, id=name, marks=pytest.mark.slow) for name, model in LARGE_MODELS.items()),
    ],
)
async def test_every_write_in_every_state_keeps_the_promises(explore: Explore, model: Model) -> None:
    found = await explore(model)

    _tell(found)
    assert [str(violation) for violation in found.findings.violations[:5]] == []
    assert {"INIT", "RUNNING", "SUCCESS", "FAIL"} <= found.statuses, "the walk came everywhere"


def _tell(found: Explored) -> None:
    print(  # noqa: T201 -- shown by `pytest -s`, and wanted in docs/reliability.md
        f"{found.states} states, {found.transitions} writes tried, {found.counted} counted, "
        f"{found.findings.checked.total()} checks"
    )
