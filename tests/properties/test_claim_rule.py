"""The claim rule and all that is built from it say the same (T11): for random documents, at random moments.

The filter of a claim ⇔ the oracle; scan, change stream and `next_claim_time` are implied by it.
"""

from __future__ import annotations

from taskmesh.admin.filters import TaskFilter
from taskmesh.admin.store.listing import find
from taskmesh.model.labels import words
from taskmesh.model.worker import Claimant
from taskmesh.store import Store, rules
from taskmesh.store.claim import claim, claim_one, won
from taskmesh.store.find import ScanRange, look_up
from tests.chaos.reading import ANYBODY_ELSE, ms, stripped
from tests.properties.documents import renamed, without_key
from tests.properties.shelf import Shelf, differing
from tests.properties.world import BEGIN, QUEUES, STATUSES, WORKERS, all_found, image, shown

_ALL_WORKERS = (*WORKERS, ANYBODY_ELSE)
_KEY = ("_id", "name", "key", "lane")
_LATER_MS = (0, 1, 999, 1_000, 2_500, 3_000)


async def test_the_derived_fields_follow_from_the_entries(shelf: Shelf) -> None:
    """`next_claim_time` is the earliest moment of any worker; `settle_time` when time alone will finish the task."""
    await _the_engine_derives_the_same(shelf)


async def test_what_is_begun_anew_is_asked_about_and_stands_in_line_again(shelf: Shelf) -> None:
    """What was finished when it was last written, and is not by its entries: as after a retry."""
    await shelf.store.driver.collection(shelf.store.tasks).update_many({}, {"$set": {"status": "FAIL"}})
    for oracle in shelf.oracles.values():
        oracle.document["status"] = "FAIL"
        oracle.derive(BEGIN)
    await _the_engine_derives_the_same(shelf)


async def test_what_is_finished_leaves_its_line_unless_it_blocks_it(shelf: Shelf) -> None:
    """What stood in line when it was last written, and is finished by its entries: as with its outcome."""
    of_a_line = {"task_state.line": {"$exists": True}}
    await shelf.store.driver.collection(shelf.store.tasks).update_many(
        of_a_line, {"$set": {"task_state.in_line": True}}
    )
    for oracle in shelf.oracles.values():
        if "line" in oracle.state:
            oracle.state["in_line"] = True
        oracle.derive(BEGIN)
    await _the_engine_derives_the_same(shelf)


async def _the_engine_derives_the_same(shelf: Shelf) -> None:
    await shelf.store.driver.collection(shelf.store.tasks).update_many({}, rules.derivation(BEGIN))
    stored = {id_: image(document) for id_, document in (await shelf.documents()).items()}
    assert not differing({id_: image(oracle.document) for id_, oracle in shelf.oracles.items()}, stored)


async def test_t11_when_a_worker_may_claim_is_what_the_oracle_says(shelf: Shelf) -> None:
    for later in _LATER_MS:
        shelf.later(later)
        fields = {
            "status": rules.status_on_reading(shelf.now),
            **{f"time{n}": rules.claim_time(worker, shelf.now) for n, worker in enumerate(_ALL_WORKERS)},
            **{f"open{n}": rules.claimable(worker, (), shelf.now) for n, worker in enumerate(_ALL_WORKERS)},
            "elsewhere": rules.claimable("w1", ["even"], shelf.now),
        }
        found = {row["_id"]: row for row in await shelf.store.find({}, fields)}
        assert not differing(
            {id_: oracle.status(shelf.now) for id_, oracle in shelf.oracles.items()},
            {id_: row["status"] for id_, row in found.items()},
        )
        for n, worker in enumerate(_ALL_WORKERS):
            times = {id_: oracle.claim_time(worker, shelf.now) for id_, oracle in shelf.oracles.items()}
            created = BEGIN - ms(7_000)
            assert not differing(times, {id_: max(created, row[f"time{n}"] or created) for id_, row in found.items()})
            assert not differing(
                {id_: time <= shelf.now for id_, time in times.items()},
                {id_: row[f"open{n}"] for id_, row in found.items()},
            )
        assert not differing(
            {
                id_: o.may_claim("w1", shelf.now, closed=o.document["queue"] == "even")
                for id_, o in shelf.oracles.items()
            },
            {id_: row["elsewhere"] for id_, row in found.items()},
        )


async def test_what_a_task_needs_and_whom_it_names_shuts_it_for_others(shelf: Shelf) -> None:
    """Labels are compared with their types; who is one of several processes may be named by the id of them all."""
    tasks = shelf.store.driver.collection(shelf.store.tasks)
    needs = [
        words(each)
        for each in ({"gpu": True}, {"gpu": 1}, {"gpu": True, "zone": "$a"}, {"n": 1.0, "deep": [{"$x": None}]})
    ]
    for n, needed in enumerate([*needs, []]):
        ids = list(shelf.oracles)[n::6]
        await tasks.update_many({"_id": {"$in": ids}}, {"$set": {"needs": needed}})
        for id_ in ids:
            shelf.oracles[id_].document["needs"] = needed
    claimants = [
        Claimant("w1"),
        Claimant.labelled("w1", {"gpu": True, "host": "h"}),
        Claimant.labelled("w4", {"worker": "w1", "gpu": 1, "zone": "$a"}),
        Claimant.labelled("w3", {"worker": "w2", "gpu": True, "zone": "$a", "n": 1.0, "deep": [{"$x": None}]}),
    ]
    shelf.later(1_000)
    fields = {f"time{n}": rules.claim_time(each, shelf.now) for n, each in enumerate(claimants)}
    found = {row["_id"]: row for row in await shelf.store.find({}, fields)}
    created = BEGIN - ms(7_000)
    for n, each in enumerate(claimants):
        times = {
            id_: oracle.claim_time(each.id, shelf.now, parent=each.parent, labels=each.labels)
            for id_, oracle in shelf.oracles.items()
        }
        assert not differing(times, {id_: max(created, row[f"time{n}"] or created) for id_, row in found.items()})
        due = {id_ for id_, time in times.items() if time <= shelf.now}
        await shelf.store.driver.collection("copies").drop()
        await tasks.aggregate([{"$out": "copies"}])
        copies = Store(shelf.store.driver.client, shelf.store.driver.database.name, "copies", now=shelf.now)
        assert len(due) == await claim(copies, list(found), each, "r1", deadline_ms=60_000) > 0
        assert {d["_id"] for d in await won(copies, found, "r1", {}, whole_state=True)} == due


async def test_a_stranger_s_needs_are_nobody_s(shelf: Shelf) -> None:
    tasks = shelf.store.driver.collection(shelf.store.tasks)
    for needs in (True, "gpu=true", {"gpu": True}, 7):
        await tasks.update_many({}, {"$set": {"needs": needs}})
        assert await claim(shelf.store, list(shelf.oracles), Claimant.labelled("w1", {"gpu": True}), "r1") == 0


async def test_t11_a_batch_of_claims_wins_what_each_would_win_alone_and_leaves_the_rest_untouched(shelf: Shelf) -> None:
    tasks = shelf.store.driver.collection(shelf.store.tasks)
    before = await shelf.documents()
    sample = list(before)[:300]
    await tasks.insert_many([renamed(before[id_], suffix) for id_ in sample for suffix in ("/alone", "/by itself")])
    shelf.later(1_000)
    expected = {
        id_
        for id_, oracle in shelf.oracles.items()
        if oracle.may_claim("w1", shelf.now, closed=oracle.document["queue"] == "odd")
    }
    assert await claim(shelf.store, list(before), "w1", "r", closed_queues=["odd"]) == len(expected)
    assert {document["_id"] for document in await won(shelf.store, list(before), "r", {})} == expected
    for id_ in sample:
        count = await claim(shelf.store, [f"{id_}/alone"], "w1", "r", closed_queues=["odd"])
        alone = await claim_one(shelf.store, f"{id_}/by itself", "w1", "r", fields={}, closed_queues=["odd"])
        assert (count == 1) == (alone is not None) == (id_ in expected)
    after = await shelf.documents()
    assert all(after[id_] == before[id_] for id_ in before if id_ not in expected)
    for id_ in sample:
        assert without_key(after[id_]) == without_key(after[f"{id_}/alone"]) == without_key(after[f"{id_}/by itself"])
    for id_ in expected:
        assert shelf.oracles[id_].claim("w1", "r", shelf.now)
        expected_document = shelf.oracles[id_].document
        assert image(after[id_]) == stripped(
            {name: expected_document[name] for name in expected_document if name not in _KEY}
        )


async def test_t11_whatever_can_be_claimed_is_found_by_the_scan_and_by_its_place_in_time(shelf: Shelf) -> None:
    for later in _LATER_MS:
        shelf.later(later)
        what = ScanRange(["job"], QUEUES, None, shelf.now)
        for worker in WORKERS:
            expected = {id_ for id_, oracle in shelf.oracles.items() if oracle.may_claim(worker, shelf.now)}
            rows = await all_found(shelf.store, worker, what)
            assert {row.id for row in rows if (row.claim_time or BEGIN - ms(7_000)) <= shelf.now} == expected
            assert all(row.next_claim_time <= shelf.now for row in rows)
            looked_up = {row.id: row.claim_time for row in await look_up(shelf.store, worker, list(expected))}
            assert looked_up.keys() == expected


async def test_listings_show_the_status_that_the_oracle_sees(shelf: Shelf) -> None:
    for later in _LATER_MS:
        shelf.later(later)
        for status in STATUSES:
            expected = {
                id_
                for id_, oracle in shelf.oracles.items()
                if oracle.status(shelf.now) == status and not oracle.forgotten(shelf.now)
            }
            assert {task["_id"] async for task in find(shelf.store, TaskFilter(status=(status,)), limit=0)} == expected


async def test_the_moment_at_which_a_task_becomes_claimable_is_the_one_that_was_told_before(shelf: Shelf) -> None:
    """Nobody touches a task: then it can be claimed from the time that was told on, unless time alone has shut it.

    It has expired by then, or so many leases have run out that nobody may try again.
    """
    told = {id_: oracle.claim_time("w1", BEGIN) for id_, oracle in shelf.oracles.items()}
    for later in _LATER_MS:
        shelf.later(later)
        rows = await shelf.store.find({}, {"open": rules.claimable("w1", (), shelf.now)})
        for row in rows:
            oracle = shelf.oracles[row["_id"]]
            shut = oracle.finished(shelf.now) or oracle.expired(shelf.now) or oracle.reading.given_up(shelf.now)
            expected = told[row["_id"]] <= shelf.now and not shut
            assert row["open"] == expected, f"{row['_id']} at T+{later}: told {shown(told[row['_id']])}"
