"""What Django promises of a task backend, asked of ours: `python -m unittest tests.integrations.django_conformance`.

Run by `test_django.py` under each Django that can be had; what it needs is in `django_settings.py`.
"""

from __future__ import annotations

import asyncio
import unittest
from datetime import UTC, datetime, timedelta
from typing import Any

import django
from django.core.exceptions import ImproperlyConfigured

django.setup()

# ruff: noqa: E402 — after Django is set up
# ruff: noqa: PT009, PT027 — run by unittest, since the environments of other Djangos have no pytest
from taskmesh import TaskMesh
from taskmesh.integrations.django import NAME, TaskmeshBackend, _meshes
from tests.integrations import django_handlers as handlers
from tests.integrations import django_settings as settings
from tests.integrations.django_here import InvalidTask, exceptions, signals, tasks


def work(alias: str = "default", **consumer: Any) -> None:
    """Do what there is, as a worker does."""

    async def run(mesh: TaskMesh) -> None:
        async with mesh:
            await mesh.consumer(worker_id="w1", **consumer).run(until_idle=True)

    asyncio.run(run(tasks.task_backends[alias].mesh))


class Backend(unittest.TestCase):
    def setUp(self) -> None:
        handlers.ran.clear()
        self.told: list[tuple[str, str, str]] = []
        for name in ("task_enqueued", "task_started", "task_finished"):
            signal = getattr(signals, name)

            def receive(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
                assert sender is TaskmeshBackend
                self.told.append((name, task_result.id, str(task_result.status)))

            signal.connect(receive, weak=False)
            self.addCleanup(signal.disconnect, receive)

    def signals_of(self, result: Any) -> list[tuple[str, str]]:
        return [(name, status) for name, id_, status in self.told if id_ == result.id]

    def test_a_task_is_enqueued_run_and_its_result_read(self) -> None:
        before = datetime.now(UTC) - timedelta(seconds=5)
        result = handlers.add.enqueue(1, b=2)
        self.assertEqual((result.status, result.args, result.kwargs), ("READY", [1], {"b": 2}))
        self.assertEqual((result.attempts, result.errors, result.backend), (0, [], "default"))
        self.assertFalse(result.is_finished)
        with self.assertRaisesRegex(ValueError, "not finished"):
            _ = result.return_value
        work()
        result.refresh()
        self.assertEqual((result.status, result.return_value, result.worker_ids), ("SUCCESSFUL", 3, ["w1"]))
        times = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
        self.assertEqual(times, sorted(times))
        self.assertLess(before, times[0])
        self.assertEqual(handlers.add.get_result(result.id).return_value, 3)
        self.assertEqual(
            self.signals_of(result),
            [("task_enqueued", "READY"), ("task_started", "RUNNING"), ("task_finished", "SUCCESSFUL")],
        )

    def test_a_coroutine_is_run(self) -> None:
        result = handlers.greet.enqueue(name="ada")
        work()
        result.refresh()
        self.assertEqual(result.return_value, {"hello": ["ada"]})

    def test_the_async_forms_do_the_same(self) -> None:
        result = asyncio.run(handlers.add.aenqueue(40))
        work()
        asyncio.run(result.arefresh())
        self.assertEqual(result.return_value, 41)
        self.assertEqual(asyncio.run(handlers.add.aget_result(result.id)).return_value, 41)

    def test_a_task_that_takes_its_context_has_it(self) -> None:
        result = handlers.who.enqueue()
        work()
        result.refresh()
        self.assertEqual(result.return_value, {"id": result.id, "attempt": 1, "status": "RUNNING"})

    def test_an_error_makes_it_fail_and_is_told(self) -> None:
        result = handlers.fail.enqueue("no such page")
        work()
        result.refresh()
        self.assertEqual((result.status, result.attempts, result.is_finished), ("FAILED", 1, True))
        [error] = result.errors
        self.assertIs(error.exception_class, LookupError)
        self.assertIn("no such page", error.traceback)
        self.assertIn("django_handlers.py", error.traceback)
        with self.assertRaisesRegex(ValueError, "Task failed"):
            _ = result.return_value
        self.assertEqual(self.signals_of(result)[-1], ("task_finished", "FAILED"))

    def test_a_result_that_is_no_json_is_a_failure(self) -> None:
        result = handlers.unstorable.enqueue()
        work()
        result.refresh()
        self.assertEqual((result.status, result.errors[0].exception_class), ("FAILED", TypeError))

    def test_it_is_tried_again_as_often_as_the_options_say(self) -> None:
        result = handlers.fail_twice.enqueue()
        work("patient")
        result.refresh()
        self.assertEqual((result.status, result.return_value, result.attempts), ("SUCCESSFUL", 3, 3))
        self.assertEqual([error.exception_class for error in result.errors], [ValueError, ValueError])
        finished = [told for told in self.signals_of(result) if told[0] == "task_finished"]
        self.assertEqual(finished, [("task_finished", "SUCCESSFUL")])

    def test_the_end_is_told_once_whatever_it_was(self) -> None:
        for task, alias in ((handlers.ask_again, "default"), (handlers.fail_always, "tireless")):
            with self.subTest(task=task.name):
                result = task.enqueue()
                work(alias)
                result.refresh()
                self.assertEqual(result.status, "FAILED")
                finished = [told for told in self.signals_of(result) if told[0] == "task_finished"]
                self.assertEqual(finished, [("task_finished", "FAILED")])

    def test_what_is_to_run_later_does_not_run_now(self) -> None:
        when = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
        result = handlers.add.using(run_after=when).enqueue(1)
        work()
        result.refresh()
        self.assertEqual((result.status, handlers.ran), ("READY", []))
        self.assertEqual(handlers.add.get_result(result.id).task.run_after, when)

    def test_the_higher_priority_runs_first(self) -> None:
        for priority in (-1, 100, 0):
            handlers.add.using(priority=priority).enqueue(priority)
        work(concurrency=1)
        self.assertEqual(handlers.ran, ["add 100", "add 0", "add -1"])

    def test_a_worker_takes_from_its_queues(self) -> None:
        result = handlers.elsewhere.enqueue()
        handlers.add.enqueue(7)
        work(queues=["other"])
        self.assertEqual(handlers.ran, ["elsewhere"])
        found = handlers.elsewhere.get_result(result.id).task
        self.assertEqual((found.queue_name, found.priority), ("other", 5))
        work()
        self.assertEqual(handlers.ran, ["elsewhere", "add 7"])

    def test_what_cannot_be_a_task_is_refused_and_nothing_is_stored(self) -> None:
        with self.assertRaises(InvalidTask):
            handlers.add.using(queue_name="unknown")
        with self.assertRaises(InvalidTask):
            handlers.add.using(priority=101)
        with self.assertRaises(InvalidTask):
            tasks.task(lambda: None)
        before = len(self.told)
        with self.assertRaises(TypeError):
            handlers.add.enqueue(object())
        self.assertEqual(len(self.told), before)

    def test_a_result_that_is_not_there_and_that_of_another_task_are_told_apart(self) -> None:
        for id_ in ("none", "", "\0"):
            with self.assertRaises(exceptions.TaskResultDoesNotExist):
                tasks.default_task_backend.get_result(id_)
        with self.assertRaises(exceptions.TaskResultMismatch):
            handlers.greet.get_result(handlers.add.enqueue(1).id)

    def test_a_cancelled_task_has_failed(self) -> None:
        result = handlers.add.enqueue(1)

        async def cancel(mesh: TaskMesh) -> None:
            async with mesh:
                await mesh.cancel(NAME, result.id)

        asyncio.run(cancel(tasks.task_backends["default"].mesh))
        result.refresh()
        self.assertEqual((result.status, result.errors[0].exception_class.__name__), ("FAILED", "TaskCancelled"))

    def test_an_event_loop_is_not_blocked(self) -> None:
        async def enqueue() -> None:
            handlers.add.enqueue(1)

        with self.assertRaisesRegex(RuntimeError, "would block the running event loop"):
            asyncio.run(enqueue())

    def test_wrong_settings_are_told(self) -> None:
        with self.assertRaisesRegex(ImproperlyConfigured, "'wrong' has 'databse'; it takes: uri, database"):
            _ = tasks.task_backends["wrong"]
        with self.assertRaisesRegex(ImproperlyConfigured, "backend 'bad': priority"):
            _ = tasks.task_backends["bad"].mesh
        with self.assertRaisesRegex(
            ImproperlyConfigured, "django_database='none' is no database of django_mongodb_back"
        ):
            _ = tasks.task_backends["nowhere"].mesh

    @unittest.skipUnless("mongodb" in settings.DATABASES, "django-mongodb-backend is not installed")
    def test_the_settings_of_django_mongodb_backend_are_used(self) -> None:
        result = handlers.add.using(backend="same").enqueue(41)
        work("same")
        result.refresh()
        self.assertEqual(result.return_value, 42)
        self.assertEqual(tasks.task_backends["same"].mesh.connection.database, settings.DATABASE)

    def test_the_worker_loads_the_mesh_of_the_default_backend(self) -> None:
        from taskmesh.integrations import django as module  # noqa: PLC0415 — as `taskmesh worker` does

        self.assertIs(module.mesh, tasks.task_backends["default"].mesh)
        with self.assertRaises(AttributeError):
            _ = module.nothing

    @classmethod
    def tearDownClass(cls) -> None:
        for mesh in _meshes.values():
            mesh.publisher.close_sync()
