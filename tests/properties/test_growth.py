"""T38: however much happens to a task, its document stays small, and a claim costs what it cost at the start."""

from __future__ import annotations

import time
from statistics import quantiles

import bson
import pytest

from taskmesh.store import rules
from taskmesh.store.finish import Outcome, report
from tests.properties.life import Held, Life

REASON = "x" * 4_000
"""As long as one is kept."""


class Hardship:
    """Round by round: an execution is lost, the next one reports progress and a line, and fails."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.claims_s: list[float] = []

    async def rounds(self, count: int) -> int:
        """Do so many; return how large the document is then."""
        for number in range(count):
            await self._claim()
            self.life.later(3_001)
            held = await self._claim()
            await self._report(held, number)
            assert await self.life.end(held, "failed", fail_reason=REASON)
        return len(bson.encode(await self.life.document()))

    async def _claim(self) -> Held:
        began = time.monotonic()
        held = await self.life.claim()
        self.claims_s.append(time.monotonic() - began)
        return held

    async def _report(self, held: Held, number: int) -> None:
        line = {"time": self.life.now, "message": f"line {number}"}
        entry = {"logs": [line]}
        progress = {"fraction": 0.5, "message": f"round {number}", "time": self.life.now}
        assert await report(
            self.life.store,
            held.worker_id,
            [Outcome(self.life.id, held.running_id, "succeeded", entry, progress=progress)],
        )


async def test_t38_m30_hundreds_of_failures_losses_and_reports_do_not_let_the_document_grow(life: Life) -> None:
    await life.publish(max_unexpected_retries=1_000_000, max_timeouts=1_000_000)
    hardship = Hardship(life)
    full = await hardship.rounds(rules.KEPT_FAILS + 2)
    later = await hardship.rounds(30)
    assert later < full * 1.01
    assert later < 200_000
    state = (await life.document())["task_state"]
    rounds = rules.KEPT_FAILS + 2 + 30
    assert len(state["worker_states"]) == rules.KEPT_FAILS, "the newest"
    assert [entry["logs"][0]["message"] for entry in state["worker_states"]][-1] == "line 29"
    assert state["dropped_fail_cnt"] == rounds - rules.KEPT_FAILS
    assert (len(state["losses"]), state["lost_cnt"]) == (rules.KEPT_LOSSES, rounds)


@pytest.mark.slow
async def test_t38_after_ten_thousand_happenings_a_claim_costs_no_more_than_twice_what_it_did(life: Life) -> None:
    await life.publish(max_unexpected_retries=1_000_000, max_timeouts=1_000_000)
    hardship = Hardship(life)
    await hardship.rounds(2_500)
    # The quickest tenth, since on a busy machine the others tell of the machine.
    start, end = (quantiles(part, n=10)[0] for part in (hardship.claims_s[:200], hardship.claims_s[-200:]))
    assert end <= 2 * start
