"""T1 the other way round: the server's clock is off, and the workers' clocks are right. Nobody notices."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from taskmesh import Status
from tests.chaos.cluster import cluster
from tests.chaos.history import DIED_AS_ASKED
from tests.chaos.scene_handlers import NAME
from tests.chaos.stage import stage
from tests.mongods import small_mongod
from tests.processes.wrong_clock import FAKETIME

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.blocks_the_loop,  # workers are started and stopped by blocking calls
    pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime (apt-get install libfaketime)"),
]

_AN_HOUR_S = 3_600.0


@pytest.mark.parametrize("off_s", [_AN_HOUR_S, -_AN_HOUR_S], ids=["ahead", "behind"])
async def test_t1_a_server_whose_clock_is_an_hour_off_costs_nothing(
    database: str, tmp_path: Path, off_s: float
) -> None:
    with small_mongod(tmp_path / "server", clock_s=off_s) as server:
        server.initiate()
        async with stage(server.uri, database, tmp_path / "stage") as set_up:
            off = (set_up.mesh.clock.now() - datetime.now(UTC)).total_seconds()
            assert abs(off - off_s) < 60, "its clock is wrong indeed"
            w1 = set_up.worker("w1")
            for n in range(20):
                await set_up.publish(f"now-{n}")
                await set_up.publish(f"later-{n}", delay_ms=1_000)
            soon = set_up.mesh.clock.now() + timedelta(seconds=1)
            await set_up.publish("expires", ends="EXPIRED", delay_ms=60_000, expire_time=soon)
            await set_up.publish("dies", {"then": "die"})
            await set_up.until_marked("started")
            assert w1.wait() == DIED_AS_ASKED
            set_up.worker("w2")
            await set_up.until_status(Status.SUCCESS, "dies")
            findings = await set_up.end(30.0)
    assert [str(violation)[:500] for violation in findings.violations] == []
    ran = Counter((run.task, run.start.pid) for run in set_up.fleet.runs)
    assert set(ran.values()) == {1}, "no worker that lived lost anything"
    by_both = [task for task, count in Counter(task for task, _ in ran).items() if count == 2]
    assert len(ran) - len(by_both) == 41, "each once, but for what w1 had not recorded when it died"
    assert f"{NAME}:dies" in by_both


@pytest.mark.parametrize("off_s", [5.0, -5.0], ids=["ahead", "behind"])
async def test_t1_a_primary_with_another_clock_than_its_successor_costs_no_more_than_the_difference(
    database: str, tmp_path: Path, off_s: float
) -> None:
    with cluster(tmp_path / "cluster", clocks_s=(off_s, 0.0, 0.0)) as servers:
        assert servers.primary() == 0, "the member that founded the set"
        async with stage(servers.uri, database, tmp_path / "stage") as set_up:
            for worker_id in ("w1", "w2"):
                set_up.worker(worker_id)
            await set_up.publish("running", {"waits": True}, worker_timeout_ms=20_000, ping_interval_ms=500)
            await set_up.until_marked("started")
            for n in range(10):
                await set_up.publish(f"later-{n}", delay_ms=2_000)
            servers.members[0].kill()
            for n in range(10):
                await set_up.publish(f"after-{n}")
            for worker_id in ("w1", "w2"):
                set_up.signs.give(f"{worker_id} may end")
            servers.members[0].start()
            findings = await set_up.end(60.0)
    assert [str(violation)[:500] for violation in findings.violations] == []
    assert len(set_up.fleet.runs) == 21, "each once"
