"""Lanes: all workers compute alike who comes first where, each has as many as any other, and few change hands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskmesh.consumer.partitions import Partitions
from taskmesh.store.publication import LANES

WORKERS = st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=24)


def all_of(workers: set[str], listening: set[str]) -> dict[str, Partitions]:
    """What each of these workers computes by itself."""
    found = {}
    for worker in workers:
        found[worker] = Partitions(worker)
        found[worker].set_workers(workers - {worker}, listening)
    return found


@given(WORKERS)
def test_each_lane_has_one_first_one_second_and_so_on(workers: set[str]) -> None:
    partitions = all_of(workers, set())
    for lane in range(LANES):
        assert sorted(each.place(lane) for each in partitions.values()) == list(range(len(workers)))


@given(WORKERS)
def test_no_worker_has_two_lanes_more_than_another(workers: set[str]) -> None:
    shares = [len(each.own or []) for each in all_of(workers, set()).values()]
    assert sum(shares) == LANES
    assert max(shares) - min(shares) <= 1


@given(st.data(), WORKERS)
def test_of_those_that_listen_one_comes_first_to_hear(data: st.DataObject, workers: set[str]) -> None:
    listening = data.draw(st.sets(st.sampled_from(sorted(workers)), min_size=1))
    partitions = all_of(workers, listening)
    for lane in range(LANES):
        assert sorted(partitions[worker].place_to_hear(lane) for worker in listening) == list(range(len(listening)))


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
    kept = sum(len(set(before[worker].own or []) & set(each.own or [])) for worker, each in after.items())
    assert not after or kept >= LANES / 3
