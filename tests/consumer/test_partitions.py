"""Lanes: all workers compute alike who comes first where, each has as many as any other, and few change hands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh import WorkerInfo
from taskmesh.consumer.candidates.partitions import MOST_SHARES, Partitions
from taskmesh.store.publication import LANES, lane_of
from tests.working import lanes_of, seen_by_others

WORKERS = st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=24)
NAMES = ["mail", "report", "video"]
QUEUES = ["fast", "slow", "else"]
FLEETS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(NAMES), min_size=1),
        st.none() | st.sets(st.sampled_from(QUEUES[:2]), min_size=1),
    ),
    min_size=1,
    max_size=8,
)
"""Of each worker the names and queues of its tasks."""
IDS = {lane_of(id_): id_ for id_ in (f"job:{n}" for n in range(2_000))}
"""A task in each lane."""


def all_of(workers: set[str], listening: set[str]) -> dict[str, Partitions]:
    """What each of these workers computes by itself."""
    fleet = [seen_by_others(worker, listens=worker in listening) for worker in workers]
    return {worker: lanes_of(worker, fleet) for worker in workers}


def own(partitions: Partitions) -> set[int]:
    """The lanes that are this worker's."""
    [(_, _, lanes)] = partitions.shares(["job"], ["default"])
    return set(range(LANES)) if lanes is None else set(lanes)


@given(WORKERS)
def test_each_lane_has_one_first_one_second_and_so_on(workers: set[str]) -> None:
    partitions = all_of(workers, set())
    for lane in range(LANES):
        places = [each.place(IDS[lane], "default") for each in partitions.values()]
        assert sorted(places) == list(range(len(workers)))
        assert [lane in own(each) for each in partitions.values()] == [place == 0 for place in places]


@given(WORKERS)
def test_no_worker_has_two_lanes_more_than_another(workers: set[str]) -> None:
    shares = [len(own(each)) for each in all_of(workers, set()).values()]
    assert sum(shares) == LANES
    assert max(shares) - min(shares) <= 1


@given(st.data(), WORKERS)
def test_of_those_with_free_slots_one_comes_first_among_them(data: st.DataObject, workers: set[str]) -> None:
    free = data.draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
    fleet = [seen_by_others(worker, running=int(worker not in free)) for worker in workers]
    partitions = {worker: lanes_of(worker, fleet) for worker in free}
    for lane in range(LANES):
        places = [each.place_among_free(IDS[lane], "default") for each in partitions.values()]
        assert sorted(places) == list(range(len(free)))
    for worker, each in partitions.items():
        assert each.others_are_full == bool(workers - free - {worker})


@given(st.data(), WORKERS)
def test_of_those_that_listen_one_comes_first_to_hear(data: st.DataObject, workers: set[str]) -> None:
    listening = data.draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
    partitions = all_of(workers, listening)
    for id_ in IDS.values():
        places = [partitions[worker].place_to_hear(id_, "default") for worker in listening]
        assert sorted(places) == list(range(len(listening)))


@given(WORKERS)
def test_where_many_listen_two_hear_of_what_is_new_in_a_lane(workers: set[str]) -> None:
    heard = {worker: each.heard for worker, each in all_of(workers, workers).items()}
    if len(workers) <= 3:
        assert not any(heard.values())
        return
    for lane in range(LANES):
        assert sum(lane in (lanes or ()) for lanes in heard.values()) == 2


@given(WORKERS)
def test_few_lanes_change_hands_beside_those_of_who_leaves(workers: set[str]) -> None:
    """By taking turns alone, nearly all would."""
    before, leaves = all_of(workers, set()), min(workers)
    after = all_of(workers - {leaves}, set()) if len(workers) > 2 else {}
    kept = sum(len(own(before[worker]) & own(each)) for worker, each in after.items())
    assert not after or kept >= LANES / 3


def _of_a_mixed_fleet(kinds: list[tuple[set[str], set[str] | None]]) -> list[tuple[WorkerInfo, Partitions]]:
    fleet = [
        seen_by_others(f"w{n}", sorted(names), None if queues is None else sorted(queues))
        for n, (names, queues) in enumerate(kinds)
    ]
    return [
        (me, lanes_of(me.worker_id, [w for w in fleet if w.competes_for(me.names, me.queues)], me.names, me.queues))
        for me in fleet
    ]


@given(FLEETS)
def test_where_workers_differ_each_task_is_the_share_of_one_that_can_run_it(
    kinds: list[tuple[set[str], set[str] | None]],
) -> None:
    fleet = _of_a_mixed_fleet(kinds)
    shares = {
        worker.worker_id: [*lanes.shares(worker.names, QUEUES if worker.queues is None else worker.queues)]
        for worker, lanes in fleet
    }
    for name in NAMES:
        for queue in QUEUES:
            able = [(worker, lanes) for worker, lanes in fleet if worker.runs(name, queue)]
            for lane in range(0, LANES, 7):
                id_ = next(f"{name}:{n}" for n in range(10_000) if lane_of(f"{name}:{n}") == lane)
                assert sorted(lanes.place(id_, queue) for _, lanes in able) == list(range(len(able)))
                assert sorted(lanes.place_to_hear(id_, queue) for _, lanes in able) == list(range(len(able)))
                looked_at_by = [
                    worker.worker_id
                    for worker, _ in able
                    for names, queues, own_lanes in shares[worker.worker_id]
                    if name in names and queue in queues and (own_lanes is None or lane in own_lanes)
                ]
                assert len(looked_at_by) == min(1, len(able))


@given(FLEETS)
def test_who_differs_hears_of_what_is_new_in_all_lanes(kinds: list[tuple[set[str], set[str] | None]]) -> None:
    for _, lanes in _of_a_mixed_fleet([*kinds, ({"mail"}, None), ({"mail", "report"}, {"fast"})]):
        if any(lanes.place(f"mail:{n}", "else") != lanes.place(f"mail:{n}", "fast") for n in range(50)):
            assert lanes.heard is None


@pytest.mark.parametrize(("queues", "shares"), [(MOST_SHARES, MOST_SHARES), (MOST_SHARES + 1, 1), (1_000, 1)])
def test_a_worker_asks_for_no_more_shares_than_so_many(queues: int, shares: int) -> None:
    names = [f"q{n}" for n in range(queues)]
    partitions = lanes_of("all", [seen_by_others(f"only-{name}", queues=[name]) for name in names])
    found = [*partitions.shares(["job"], names)]
    assert len(found) == shares
    assert sorted(queue for _, some, _ in found for queue in some) == sorted(names)


def test_of_tasks_that_need_labels_those_that_have_them_come_first() -> None:
    fleet = [seen_by_others(f"w{n}", labels={"gpu": True} if n == 3 else {}) for n in range(6)]
    partitions = lanes_of("w3", fleet)
    needs = ["gpu=true"]
    assert fleet[3].claimant.has(needs)
    assert {partitions.place_to_hear(id_, "default", needs) for id_ in IDS.values()} == {0}
    assert len({partitions.place_to_hear(id_, "default") for id_ in IDS.values()}) > 3
