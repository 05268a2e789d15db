"""The engine does what the oracle does: 20 000 random operations in four quarters, the documents compared whole after each.

`SEED=… make test ARGS="-k state_machine"` replays a run, `OPERATIONS=…` makes it longer or shorter; `slow` is a longer one.
"""

from __future__ import annotations

import logging
import os

import pytest

from taskmesh.store import finish, rules
from tests.properties import machine, oracle
from tests.properties.chance import LABELS

logger = logging.getLogger(__name__)
SEED = os.environ.get("SEED", "taskmesh")
OPERATIONS = int(os.environ.get("OPERATIONS", "20000"))
_WORLDS = 6
_ENOUGH_FOR_ALL_KINDS = 5_000


@pytest.fixture(autouse=True)
def _little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents drop their oldest failures and losses already at the second and third."""
    for module in (rules, oracle):
        monkeypatch.setattr(module, "KEPT_FAILS", 1)
        monkeypatch.setattr(module, "KEPT_LOSSES", 2)
    for module in (finish, oracle):
        monkeypatch.setattr(module, "KEPT_STAGES", 3)


@pytest.mark.lasting
@pytest.mark.blocks_the_loop  # it does not, but the guard looks at the stack at every call, and doubles the time
@pytest.mark.parametrize(
    ("run", "operations"),
    [
        *((quarter, OPERATIONS // 4) for quarter in ("one", "two", "three", "four")),  # so that four can run at once
        pytest.param("long", OPERATIONS, marks=pytest.mark.slow),
    ],
)
async def test_engine_and_oracle_agree_on_every_document_and_every_claim(
    mongo_uri: str, database: str, run: str, operations: int
) -> None:
    async with machine.worlds(mongo_uri, database, _WORLDS) as worlds:
        succeeded = await machine.drive(worlds, f"{SEED}/{run}", operations)
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(succeeded.items()))
    logger.info("SEED=%s OPERATIONS=%d, of which had an effect: %s", SEED, operations, counts)
    if operations >= _ENOUGH_FOR_ALL_KINDS:
        assert not LABELS - set(succeeded), "these kinds of operation never had an effect"
