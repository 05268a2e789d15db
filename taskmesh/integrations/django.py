"""Django's tasks on taskmesh: a backend for `django.tasks` (Django 6), and for the package django-tasks (Django 4.2 and 5.2).

    TASKS = {"default": {"BACKEND": "taskmesh.integrations.django.TaskmeshBackend", "OPTIONS": {"database": "shop"}}}

    DJANGO_SETTINGS_MODULE=shop.settings taskmesh worker taskmesh.integrations.django:mesh

All tasks of Django are taskmesh tasks of one name, `django`; the key is the id of the result, and the path of the function a tag.
A task is tried once unless `OPTIONS["option"]` says otherwise; one whose worker is lost is run again.
"""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections
from django.utils import timezone
from django.utils.module_loading import import_string

from taskmesh.consumer.run.context import current_blocking_task
from taskmesh.mesh import TaskMesh
from taskmesh.model.errors import InvalidKey, InvalidOption, Snooze, TaskFailed, TaskNotFound
from taskmesh.model.option import TaskOption
from taskmesh.model.task import Status, Task
from taskmesh.store.mongodb.driver import twin_of

NAME = "django"
"""The taskmesh name of all tasks of Django."""
_SETTINGS = ("uri", "database", "collection", "django_database", "option")
_MONGODB = "django_mongodb_backend"
_TRIED_ONCE: dict[str, Any] = {"max_unexpected_retries": 0}


def _tasks(module: str = "") -> Any:
    """Return a module of Django's tasks, or the one of the package that they came from."""
    package = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    try:
        return importlib.import_module(package + module)
    except ModuleNotFoundError as error:
        raise ImproperlyConfigured(
            f"Django {django.get_version()} has no tasks of its own: install django-tasks, or Django 6"
        ) from error


_base: Any = _tasks(".backends.base").BaseTaskBackend
_Result: Any = _tasks(".base").TaskResult
_Error: Any = _tasks(".base").TaskError
_Status: Any = _tasks(".base").TaskResultStatus
_NOT_FOUND: Any = _tasks(".exceptions").TaskResultDoesNotExist
_STATUS = {Status.INIT: _Status.READY, Status.RUNNING: _Status.RUNNING, Status.SUCCESS: _Status.SUCCESSFUL}
"""All others are FAILED."""

_meshes: dict[tuple[str, str], TaskMesh] = {}
"""By alias and options: Django makes a backend for each thread, and they share one mesh."""
_lock = threading.Lock()


class TaskmeshBackend(_base):
    """A backend of Django's tasks: they are stored in MongoDB, and run by `taskmesh worker`.

    `OPTIONS`: `uri`, `database` (`"taskmesh"`) and `collection` (`"tasks"`) as `TaskMesh` takes them. `django_database`: the
    alias of a database of django-mongodb-backend, whose settings are used instead; without either, those of the default database
    if it is one, else `TASKMESH_URI`. `option`: fields of `TaskOption`, as a dict. Raises `ImproperlyConfigured`.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        if unknown := sorted(set(self.options) - set(_SETTINGS)):
            raise ImproperlyConfigured(
                f"OPTIONS of the task backend {alias!r} has {unknown[0]!r}; it takes: {', '.join(_SETTINGS)}"
            )

    @property
    def mesh(self) -> TaskMesh:
        """The mesh of this backend, one for all threads: for `taskmesh worker`, and for all that it offers."""
        key = self.alias, repr(sorted(self.options.items()))
        with _lock:
            if key not in _meshes:
                _meshes[key] = self._define()
        return _meshes[key]

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Publish the task. Raises what `validate_task` raises, and `TypeError` for arguments that are no JSON."""
        self.validate_task(task)
        result = self._result(task, uuid.uuid4().hex, _Status.READY, args=list(args), kwargs=dict(kwargs))
        definition = self.mesh.definitions[NAME].configure(
            queue=task.queue_name, priority=task.priority, start_time=_ours(task.run_after), tags=[task.module_path]
        )
        definition.publish_sync(result.id, task=task.module_path, args=result.args, kwargs=result.kwargs)
        object.__setattr__(result, "enqueued_at", timezone.now())
        _tasks(".signals").task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the result as it stands now. Raises `TaskResultDoesNotExist`."""
        try:
            return self._read(self.mesh.get_sync(NAME, result_id))
        except (TaskNotFound, InvalidKey) as error:
            raise _NOT_FOUND(result_id) from error

    # --- between Django's words and ours ---

    def _define(self) -> TaskMesh:
        """Make the mesh and its one task."""
        try:
            option = TaskOption(**_TRIED_ONCE | dict(self.options.get("option") or {}))
        except InvalidOption as error:
            raise ImproperlyConfigured(f"OPTIONS of the task backend {self.alias!r}: {error}") from error
        where = {name: self.options[name] for name in ("database", "collection") if name in self.options}
        client = self.options.get("uri")
        alias = self.options.get("django_database", None if client else "default")
        if alias is not None and alias in connections and connections[alias].vendor == "mongodb":
            connection = connections[alias]
            client = twin_of(connection.get_new_connection(connection.get_connection_params()))
            where = {"database": connection.settings_dict["NAME"], **where}
        elif "django_database" in self.options:
            raise ImproperlyConfigured(
                f"OPTIONS of the task backend {self.alias!r}: django_database={alias!r} is no database of {_MONGODB}"
            )
        mesh = TaskMesh(client, **where)

        def run(task: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
            del task  # it stands in the stored task, which is read with all else that Django wants to know
            return self._run(args, kwargs)

        mesh.task(run, name=NAME, run="thread", option=option)
        return mesh

    def _read(self, task: Task) -> Any:
        """Return the result that a stored task is."""
        params = task.params or {}
        found = _imported(params["task"]).using(
            priority=task.task_option.priority,
            queue_name=task.queue,
            run_after=_djangos(task.task_state.start_time),
            backend=self.alias,
        )
        state = task.task_state
        executions = [(entry.start_time, entry.worker_id) for entry in state.worker_states]
        executions += [(loss.start_time, loss.worker_id) for loss in state.losses]
        attempts = sorted((start, worker_id) for start, worker_id in executions if start is not None)
        result = self._result(
            found,
            task.key,
            _STATUS.get(task.status, _Status.FAILED),
            args=params["args"],
            kwargs=params["kwargs"],
            enqueued_at=_djangos(state.create_time),
            started_at=_djangos(attempts[0][0]) if attempts else None,
            last_attempted_at=_djangos(attempts[-1][0]) if attempts else None,
            finished_at=_djangos(task.finish_time),
            errors=_errors(task),
            worker_ids=[worker_id for _, worker_id in attempts],
        )
        if task.successes:
            object.__setattr__(result, "_return_value", task.successes[0].returns)
        return result

    def _result(self, task: Any, id_: str, status: Any, **fields: Any) -> Any:
        times = dict.fromkeys(("enqueued_at", "started_at", "last_attempted_at", "finished_at"))
        lists: dict[str, list[Any]] = {"errors": [], "worker_ids": []}
        return _Result(task=task, id=id_, status=status, backend=self.alias, **times | lists | fields)

    # --- in a worker ---

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run a task of Django in this thread, as a request is served: no connection that is too old, and signals around it."""
        signals = _tasks(".signals")
        close_old_connections()
        try:
            stored = self.mesh.get_sync(NAME, current_blocking_task().key)
            result = self._read(stored)
            task = result.task
            signals.task_started.send(sender=type(self), task_result=result)
            try:
                context = [_tasks(".base").TaskContext(task_result=result)] if task.takes_context else []
                value = _tasks(".base").normalize_json(task.call(*context, *args, **kwargs))
            except Exception as error:
                if _is_final(stored, error):
                    self._finished(result, _Status.FAILED)
                raise
            object.__setattr__(result, "_return_value", value)
            self._finished(result, _Status.SUCCESSFUL)
            return value
        finally:
            close_old_connections()

    def _finished(self, result: Any, status: Any) -> None:
        object.__setattr__(result, "status", status)
        object.__setattr__(result, "finished_at", timezone.now())
        _tasks(".signals").task_finished.send(type(self), task_result=result)


def _imported(path: str) -> Any:
    """Return the task whose function is there. Raises `ImportError`, and `TypeError` for what is no task."""
    found = import_string(path)
    if not isinstance(found, _tasks(".base").Task):
        raise TypeError(f"{path} is not a task of Django: put @task on the function, under the function's own name")
    return found


def _errors(task: Task) -> list[Any]:
    """Return why each execution failed or was lost, and why the task was given up, in Django's words."""
    failed = [
        _Error(exception_class_path=_path(entry.fail_type), traceback=entry.fail_reason or "")
        for entry in task.task_state.worker_states
        if entry.state == "FAIL"
    ]
    lost = [
        _Error(exception_class_path="taskmesh.LeaseLost", traceback=f"worker {loss.worker_id} was lost")
        for loss in task.task_state.losses
    ]
    gone = {Status.CANCELLED: "taskmesh.TaskCancelled", Status.EXPIRED: "taskmesh.TaskExpired"}.get(task.status)
    return failed + lost + ([_Error(exception_class_path=gone, traceback="")] if gone else [])


def _path(fail_type: str | None) -> str:
    """Return where the class is of which the type is told as `outcome` writes it."""
    if fail_type is None:
        return "taskmesh.TaskError"
    if "." in fail_type:
        return fail_type
    return f"{'taskmesh' if hasattr(importlib.import_module('taskmesh'), fail_type) else 'builtins'}.{fail_type}"


def _is_final(task: Task, error: Exception) -> bool:
    """Whether the task is not tried again after this error."""
    if isinstance(error, TaskFailed):
        return True
    state = task.task_state
    failures = sum(entry.state == "FAIL" for entry in state.worker_states) + state.dropped_fail_cnt
    return not isinstance(error, Snooze) and failures >= task.task_option.max_unexpected_retries


def _ours(moment: datetime | None) -> datetime | None:
    """Return an aware time; without USE_TZ Django's are naive, in its time zone."""
    return timezone.make_aware(moment) if moment is not None and timezone.is_naive(moment) else moment


def _djangos(moment: datetime | None) -> datetime | None:
    return moment if moment is None or settings.USE_TZ else timezone.make_naive(moment)


def __getattr__(name: str) -> Any:
    """`mesh`: that of the default backend, with Django set up: what `taskmesh worker taskmesh.integrations.django:mesh` loads."""
    if name != "mesh":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not apps.ready:
        django.setup()
    backend = _tasks().task_backends["default"]
    if not isinstance(backend, TaskmeshBackend):
        raise ImproperlyConfigured(f"the default backend of TASKS is {type(backend).__name__}, not TaskmeshBackend")
    return backend.mesh
