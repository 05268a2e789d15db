"""What fails, and why: failures are grouped by name, type and place, counted right, and found with a bounded look."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pymongo import AsyncMongoClient

from taskmesh import Status, TaskFailed, TaskMesh, TaskOption
from taskmesh.admin.error_groups import LOST, ErrorGroup, kind_of, telling_part
from tests.waiting import eventually
from tests.working import finished, status_is, working

ONCE = TaskOption(max_unexpected_retries=0)
PATIENT = TaskOption(unexpected_retry_delay_ms=600_000)


async def fits(mesh: TaskMesh, group: ErrorGroup) -> list[str]:
    """Return the keys of the tasks that fit a group's own filter."""
    return sorted([task.key async for task in mesh.find(where=group.where, limit=0)])


async def test_errors_of_one_type_from_one_place_are_one_group_and_others_are_not(mesh: TaskMesh) -> None:
    @mesh.task(option=ONCE)
    async def fetch(url: str, how: str) -> None:
        if how == "slow":
            raise TimeoutError(f"{url} did not answer within 10 s")
        if how == "gone":
            raise LookupError(f"no such host: {url}")
        raise TimeoutError("given up")

    @mesh.task(option=ONCE)
    async def send(url: str) -> None:
        raise TimeoutError(f"{url} did not answer within 10 s")

    kinds = {"slow": 4, "gone": 2, "else": 1}
    await fetch.publish_many(
        {f"{how}-{n}": {"url": f"h{n}", "how": how} for how, n_ in kinds.items() for n in range(n_)}
    )
    await send.publish("mail-1", url="h1")
    async with working(mesh, "w1"):
        for key in [f"{how}-{n}" for how, count in kinds.items() for n in range(count)]:
            await finished(mesh, "fetch", key)
        await finished(mesh, "send", "mail-1")
    report = await mesh.inspect.errors()
    assert [(group.name, group.error, group.failed) for group in report.groups] == [
        ("fetch", "TimeoutError", 4),
        ("fetch", "LookupError", 2),
        ("fetch", "TimeoutError", 1),
        ("send", "TimeoutError", 1),
    ]
    assert (report.looked_at, report.complete) == (8, True)
    slow, gone, *_ = report.groups
    assert slow.message.startswith("TimeoutError: h")
    assert slow.frame is not None
    assert slow.frame.startswith("tests/admin/test_errors.py:")
    assert slow.frame.endswith(" in fetch")
    assert slow.first_time is not None
    assert slow.last_time is not None
    assert slow.first_time <= slow.last_time
    assert slow.example_key.startswith("slow-")
    assert await fits(mesh, gone) == ["gone-0", "gone-1"]
    assert [group.failed for group in (await mesh.inspect.errors("send")).groups] == [1]


async def test_a_group_is_retried_by_its_own_filter_and_nothing_else(mesh: TaskMesh) -> None:
    @mesh.task
    async def send(to: str, code: int) -> None:
        raise TaskFailed(f"{code} 5.1.1 no such mailbox: '{to}'" if to else "the template is broken")

    await send.publish_many(
        {f"m{n}": {"to": f"user{n}", "code": 550 + n} for n in range(3)} | {"t": {"to": "", "code": 1}}
    )
    async with working(mesh, "w1"):
        for key in ("m0", "m1", "m2", "t"):
            await finished(mesh, "send", key)
    mailbox, template = (await mesh.inspect.errors()).groups
    assert (mailbox.failed, mailbox.error) == (3, "… no such mailbox: …")
    assert (template.failed, template.error) == (1, "the template is broken")
    done = await mesh.bulk.retry(mailbox.where)
    assert done.done == 3
    assert (await mesh.get("send", "t")).status == Status.FAIL


async def test_failures_that_differ_in_unquoted_names_alone_are_one_group_by_type_and_place(mesh: TaskMesh) -> None:
    names = ["ann", "bob", "cleo"]

    def refuse(customer: str) -> None:
        raise TaskFailed(f"customer {customer} has no address")

    @mesh.task
    async def send(to: str) -> None:
        refuse(to)

    @mesh.task(run="process")
    def pack(to: str) -> None:
        refuse(to)

    for definition in (send, pack):
        await definition.publish_many({name: {"to": name} for name in names})
    async with working(mesh, "w1", concurrency=1):  # and so one child
        for key in names:
            await finished(mesh, "send", key)
            await finished(mesh, "pack", key)
    groups = (await mesh.inspect.errors()).groups
    assert sorted((group.name, group.error, group.failed) for group in groups) == [
        ("pack", "customer … has no address", 3),
        ("send", "customer … has no address", 3),
    ]
    for group in groups:
        assert group.frame is not None
        assert group.frame.startswith("tests/admin/test_errors.py:")
        assert group.frame.endswith(" in refuse")
        assert await fits(mesh, group) == names
    [entry] = (await mesh.get("send", "ann")).task_state.worker_states
    assert entry.fail_type == "TaskFailed"


async def test_what_is_to_be_retried_counts_apart_from_what_failed_for_good(mesh: TaskMesh) -> None:
    @mesh.task(option=PATIENT)
    async def work(final: bool) -> None:
        if final:
            raise TaskFailed("ValueError: no")
        raise ValueError("no")

    await work.publish_many({"waits": {"final": False}, "failed": {"final": True}, "never": {"final": False}})
    await mesh.cancel("work", "never")
    async with working(mesh, "w1"):
        await finished(mesh, "work", "failed")

        async def tried() -> bool:
            return bool((await mesh.get("work", "waits")).task_state.worker_states)

        await eventually(tried)
        await status_is(mesh, "work", "waits", Status.INIT)
    by_key = {group.example_key: group for group in (await mesh.inspect.errors()).groups}
    assert (by_key["waits"].failed, by_key["waits"].retrying) == (0, 1)
    assert (by_key["failed"].failed, by_key["failed"].retrying) == (1, 0)
    assert await fits(mesh, by_key["waits"]) == ["waits"]


async def test_executions_that_were_lost_are_a_group_of_their_own(mesh: TaskMesh) -> None:
    begun = asyncio.Event()

    @mesh.task(option=TaskOption(max_timeouts=0, worker_timeout_ms=2_500, ping_interval_ms=500))
    async def work() -> None:
        begun.set()
        await asyncio.sleep(600)

    await work.publish("k")
    entries = "task_state.worker_states"
    async with working(mesh, "w1") as consumer:
        await asyncio.wait_for(begun.wait(), 20)
        # As of a worker that was killed: its lease ran out, and it will write no more.
        await mesh.store.driver.collection("tasks").update_one(
            {"_id": "work:k"}, [{"$set": {f"{entries}.running_id": "of-a-dead-one"}}]
        )
        await eventually(lambda: not consumer.running)
        await status_is(mesh, "work", "k", Status.FAIL)

        async def counted() -> bool:
            return (await mesh.get("work", "k")).task_state.lost_cnt == 1

        await eventually(counted)
    [group] = (await mesh.inspect.errors()).groups
    assert (group.error, group.failed, group.frame) == (LOST, 1, None)
    assert "lost:yes" in group.where
    assert await fits(mesh, group) == ["k"]


async def test_a_bounded_look_sees_some_of_each_name_and_says_that_there_are_more(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    @mesh.task
    async def rare() -> None:
        raise TaskFailed("a rare trouble")

    @mesh.task
    async def common() -> None:
        raise TaskFailed("a common trouble")

    await rare.publish("k")
    await common.publish("k000")
    async with working(mesh, "w1"):
        await finished(mesh, "rare", "k")
        await finished(mesh, "common", "k000")
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        tasks = client[database].tasks
        template = await tasks.find_one({"_id": "common:k000"})
        assert template is not None
        copies = [template | {"_id": f"common:k{n:03}", "key": f"k{n:03}"} for n in range(1, 300)]
        strangers: list[dict[str, Any]] = [
            {"_id": "!", "status": "FAIL", "queue": "default", "name": "common"},
            {"_id": 7, "status": "FAIL"},
        ]
        await tasks.insert_many([*copies, *strangers])
    report = await mesh.inspect.errors(at_most=100)
    assert not report.complete
    assert report.looked_at <= 100
    assert {group.error: group.failed for group in report.groups} == {"a common trouble": 50, "a rare trouble": 1}
    everything = await mesh.inspect.errors()
    assert everything.complete
    assert {group.error: group.failed for group in everything.groups} == {"a common trouble": 300, "a rare trouble": 1}


async def test_the_deadline_holds(mesh: TaskMesh) -> None:
    await mesh.publish("work", "k")
    report = await mesh.inspect.errors(deadline_ms=0)
    assert (report.groups, report.looked_at, report.complete) == ([], 0, False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cannot read /srv/a.txt", "cannot read /srv/b/c.txt"),
        ("no mail to a@b.example today", "no mail to c@d.example today"),
        ("https://a.example/x did not answer", "https://b.example/y did not answer"),
        ("order 17 of 2026-11-21 is gone", "order 4 of 2026-11-22 is gone"),
        ("no user 'ann'", "no user 'bob'"),
    ],
)
def test_what_is_another_each_time_does_not_tell_errors_apart(one: str, other: str) -> None:
    assert kind_of({"line": one}) == kind_of({"line": other})
    assert kind_of({"line": one}) != kind_of({"line": "it rained"})


@pytest.mark.parametrize("text", ["lost:maybe", "lost>1"])
async def test_lost_is_yes_or_no(mesh: TaskMesh, text: str) -> None:
    if text == "lost>1":
        assert await mesh.listing.count(text) == 0  # the beginning of a key
        return
    with pytest.raises(Exception, match="yes or no"):
        await mesh.listing.count(text)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (["it rained in 'x'"], "it rained in 'x'"),
        (["ValueError: no image 'bad1.jpg'", "ValueError: no image 'bad2.jpg'"], "ValueError: no image"),
        (["550 5.1.1 no such mailbox: 'a'", "551 5.1.1 no such mailbox: 'b'"], "no such mailbox:"),
        (["can't connect to host 7", "can't connect to host 8"], "can't connect to host"),
        (["no answer from a@b.example", "no answer from c@d.example"], "no answer from"),
        (["1", "2"], None),
        ([""], None),
    ],
)
def test_the_text_that_tells_a_group_from_others_needs_no_quotes_that_nobody_closes(
    lines: list[str], part: str | None
) -> None:
    assert telling_part(lines) == part
