"""A handler that was stopped keeps its place until it has ended: nobody starts beside it, whatever is done to its task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskmesh import Status, TaskMesh, TaskNotFound, TaskOption, current_task
from taskmesh.client.definition import TaskDefinition
from tests.faults import another_mesh, failing_commands
from tests.waiting import eventually
from tests.working import all_working, finished, parts_of, working

OPTION = TaskOption(ping_interval_ms=300, worker_timeout_ms=3_500)
LONGER_THAN_THE_LEASE_S = 4.0

Job = TaskDefinition[Any, Any]
BeginAnew = Callable[[TaskMesh, Job], Awaitable[Any]]


async def cancel_and_retry(mesh: TaskMesh, _: Job) -> None:
    await mesh.cancel("job", "k")
    task = await mesh.retry("job", "k")
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])
    assert task.next_claim_time is not None, "at the end of the lease at the latest"


async def cancel_and_run_again(mesh: TaskMesh, job: Job) -> None:
    await mesh.cancel("job", "k")
    assert (await job.configure(run_again=True).publish("k")).updated


async def delete_and_publish(mesh: TaskMesh, job: Job) -> None:
    await mesh.delete("job", "k")
    with pytest.raises(TaskNotFound):
        await mesh.get("job", "k")
    assert [task async for task in mesh.find()] == []
    assert (await mesh.stats()).counts == {}
    assert (await job.publish("k")).created
    task = await mesh.get("job", "k")
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])


async def delete_and_publish_in_a_session(mesh: TaskMesh, job: Job) -> None:
    await mesh.delete("job", "k")
    async with mesh.store.driver.session() as session, await session.start_transaction():
        assert (await job.configure(session=session).publish("k")).created


async def exclude(mesh: TaskMesh, _: Job) -> None:
    task = await mesh.get("job", "k")
    [runs] = [entry.worker_id for entry in task.task_state.worker_states]
    [other] = {"w1", "w2"} - {runs}
    task = await mesh.set_option("job", "k", specific_worker_ids=(other,))
    assert (task.status, task.task_state.worker_states) == (Status.INIT, [])


WAYS = [cancel_and_retry, cancel_and_run_again, delete_and_publish, delete_and_publish_in_a_session, exclude]


class Witness:
    """Who is at work, and how many were at once."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.runs: list[str] = []
        self.most = 0
        self.cleaning_up = asyncio.Event()
        self.may_end = asyncio.Event()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[bool]:
        """The first run is one that has to be stopped, and cleans up until it is told to end."""
        first = not self.runs
        self.runs.append(current_task().running_id)
        self.at_work.append(current_task().running_id)
        self.most = max(self.most, len(self.at_work))
        try:
            yield first
        finally:
            if first:
                self.cleaning_up.set()
                await self.may_end.wait()
            self.at_work.remove(current_task().running_id)


def defined(mesh: TaskMesh, witness: Witness) -> Job:
    @mesh.task(option=OPTION)
    async def job() -> str:
        async with witness.run() as first:
            await asyncio.sleep(3_600 if first else 0)
        return "done"

    return job


@pytest.mark.parametrize("listen", [True, False], ids=["listening", "not listening"])
@pytest.mark.parametrize("begin_anew", WAYS)
async def test_a_task_begun_anew_waits_for_the_handler_that_cleans_up(
    mesh: TaskMesh, begin_anew: BeginAnew, listen: bool
) -> None:
    witness = Witness()
    job = defined(mesh, witness)
    await job.publish("k")
    async with all_working(mesh, ["w1", "w2"], listen=listen):
        await eventually(lambda: witness.runs)
        await begin_anew(mesh, job)
        await asyncio.wait_for(witness.cleaning_up.wait(), 20)
        # Nothing tells of what does not happen: longer than the lease, which its worker renews.
        await asyncio.sleep(LONGER_THAN_THE_LEASE_S)
        assert len(witness.runs) == 1
        [leaving] = (await mesh.get("job", "k")).task_state.leaving
        assert leaving.running_id == witness.runs[0]
        [room] = [gate for gate in (await mesh.explain("job", "k", "w2"))[0].gates if gate.name == "room"]
        assert not room.open
        assert "1 stopped but still running" in room.reason
        witness.may_end.set()
        task = await finished(mesh, "job", "k", 20)
    assert witness.most == 1, "never two at work at once"
    assert (task.status, task.task_state.lost_cnt, task.task_state.leaving) == (Status.SUCCESS, 0, [])
    assert [entry.state for entry in task.task_state.worker_states] == ["SUCCESS"]


async def test_room_that_a_handler_leaves_is_taken_at_once(mesh: TaskMesh) -> None:
    """Long before its lease would have ended, and by a worker that never scans again in time."""
    witness = Witness()

    @mesh.task(option=TaskOption(ping_interval_ms=60_000, worker_timeout_ms=600_000))
    async def job() -> None:
        async with witness.run() as first:
            await asyncio.sleep(3_600 if first else 0)

    await job.publish("k")
    async with working(mesh):
        await eventually(lambda: witness.runs)
        await cancel_and_retry(mesh, job)
        await witness.cleaning_up.wait()
        witness.may_end.set()
        await finished(mesh, "job", "k", 20)


async def test_room_of_a_worker_that_dies_meanwhile_is_free_when_its_lease_ends(mesh: TaskMesh) -> None:
    witness = Witness()
    job = defined(mesh, witness)
    await job.publish("k")
    async with working(mesh, "w1") as w1:
        await eventually(lambda: witness.runs)
        await delete_and_publish(mesh, job)
        await parts_of(
            w1
        ).pinger.stop()  # as if it had died: nothing renews the lease, and nothing tells of the handler's end
        async with working(mesh, "w2"):
            task = await finished(mesh, "job", "k", 20)
        assert [entry.worker_id for entry in task.successes] == ["w2"]
        assert task.task_state.lost_cnt == 0
        witness.may_end.set()


async def test_of_a_deleted_task_nothing_is_left_when_its_handler_has_ended(mesh: TaskMesh) -> None:
    witness = Witness()
    job = defined(mesh, witness)
    await job.publish("k")
    async with working(mesh):
        await eventually(lambda: witness.runs)
        await mesh.delete("job", "k")
        witness.may_end.set()
        tasks = mesh.store.driver.collection(mesh.store.tasks)

        async def is_due_to_go() -> bool:
            document = await tasks.find_one({"_id": "job:k"})
            return document is None or (
                "leaving" not in document["task_state"] and document["delete_time"] <= mesh.clock.now()
            )

        await eventually(is_due_to_go, 20, what="the TTL monitor may remove the document")


async def test_a_cancelled_task_without_retention_keeps_the_place_of_its_handler_too(mesh: TaskMesh) -> None:
    witness = Witness()
    job = defined(mesh, witness)
    await job.configure(retain_failed_ms=0).publish("k")
    async with working(mesh):
        await eventually(lambda: witness.runs)
        await mesh.cancel("job", "k")
        await witness.cleaning_up.wait()
        document = await mesh.store.driver.collection(mesh.store.tasks).find_one({"_id": "job:k"})
        assert document["delete_time"] >= document["task_state"]["worker_states"][0]["ping_expire_time"]
        witness.may_end.set()

        async def is_gone() -> bool:
            try:
                await mesh.get("job", "k")
            except TaskNotFound:
                return True
            return False

        await eventually(is_gone, 20)


async def test_a_late_word_of_an_earlier_life_stops_no_execution_of_the_new_one(
    mesh: TaskMesh, mongo_uri: str, database: str
) -> None:
    """The stream is seconds behind: it tells of the cancel when the retried task runs."""
    runs: list[str] = []
    may_end = {1: asyncio.Event(), 2: asyncio.Event()}
    cut_short: list[str] = []
    async with another_mesh(mongo_uri, database, "the late worker") as late:

        @late.task(option=TaskOption(ping_interval_ms=30_000, worker_timeout_ms=60_000))
        async def job() -> int:
            runs.append(current_task().running_id)
            number = len(runs)
            try:
                await may_end[number].wait()
            except asyncio.CancelledError:
                cut_short.append(current_task().running_id)
                raise
            return number

        await job.publish("k")
        async with working(late, "late"):
            await eventually(lambda: runs)
            heard = late.feed.delivered
            async with failing_commands(
                mongo_uri, ["getMore"], appname="the late worker", blockConnection=True, blockTimeMS=4_000
            ) as held_up:
                await held_up()
                await mesh.cancel("job", "k")
                may_end[1].set()

                async def has_ended() -> bool:
                    entries = (await mesh.get("job", "k")).task_state.worker_states
                    return [entry.state for entry in entries] == ["FAIL"]

                await eventually(has_ended, what="the first run has ended by itself")
                await mesh.retry("job", "k")
                await eventually(lambda: len(runs) == 2, what="the scan has found the task")
            await eventually(lambda: late.feed.delivered >= heard + 2, what="the stream tells of the cancel")
            for _ in range(5):  # what it asks of the database thereupon is answered before this
                await late.get("job", "k")
            assert cut_short == []
            may_end[2].set()
            task = await finished(mesh, "job", "k", 20)
    assert (task.status, task.task_state.lost_cnt, cut_short) == (Status.SUCCESS, 0, [])


async def test_a_task_cancelled_after_its_worker_was_told_to_stop_is_told_the_end_of_its_handler(
    mesh: TaskMesh,
) -> None:
    """The worker's own end for it, given back, is refused: it notes instead that the handler has ended."""
    witness = Witness()

    @mesh.task(option=TaskOption(ping_interval_ms=60_000, worker_timeout_ms=600_000))
    async def job() -> None:
        async with witness.run() as first:
            await asyncio.sleep(3_600 if first else 0)

    await job.publish("k")
    async with working(mesh) as consumer:
        await eventually(lambda: witness.runs)
        consumer.begin_stop(grace_ms=0)
        await witness.cleaning_up.wait()
        await mesh.cancel("job", "k")
        witness.may_end.set()

        async def noted() -> bool:
            return [entry.state for entry in (await mesh.get("job", "k")).task_state.worker_states] == ["FAIL"]

        await eventually(noted, what="the entry shows that the handler has ended")
