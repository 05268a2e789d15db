"""Definitions whose handler gets many tasks in one call: `@mesh.task(batch=100)`.

Each task holds one item. It is published, claimed, renewed and finished like any other; only the handler's call is shared.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from taskmesh.client.definition import Run, TaskDefinition
from taskmesh.client.params import Params
from taskmesh.client.publisher import Publisher
from taskmesh.client.returns import Annotation, Returns, annotation
from taskmesh.model.configuration import Configuration
from taskmesh.model.error_policy import ErrorPolicy
from taskmesh.model.errors import InvalidOption, UnstorableValue
from taskmesh.model.ids import shown

T = TypeVar("T")
R = TypeVar("R")
ITEM = "item"
"""The name of the only param that such a task has."""
DEFAULT_WAIT_MS = 50
_MOST, _LONGEST_WAIT_MS = 1_000, 60_000
_LISTS = (list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)


class BatchDefinition(TaskDefinition[[T], R], Generic[T, R]):
    """A task whose handler takes a list of items, one of each task, and returns a list of values or errors, or None."""

    def __init__(
        self,
        publisher: Publisher,
        fn: Callable[..., Any],
        name: str,
        configuration: Configuration,
        run: Run | None,
        errors: ErrorPolicy,
        batch: Any,
        wait_ms: Any,
    ) -> None:
        if run == "process":
            raise InvalidOption(
                f"task {name!r}: batch cannot be combined with run='process': use a thread, or leave batch out"
            )
        super().__init__(publisher, fn, name, configuration, run, errors=errors)
        self.batch = _checked("batch", batch, 1, _MOST)
        self.batch_wait_ms = _checked("batch_wait_ms", wait_ms, 0, _LONGEST_WAIT_MS)
        self.params = ItemParams(name, fn)
        self.returns = ItemReturns(f"the result of task {name!r}", fn)

    def __call__(self, items: list[T], /) -> Any:  # type: ignore[override]  # it is published by item, and called with many
        """Call the handler's function, here and now."""
        return self.fn(items)  # type: ignore[arg-type]  # as above


class ItemParams(Params):
    """The params of such a task: one item, of the type of which the handler takes a list."""

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        super().__init__(name, fn)
        given = self._signature.parameters.values()
        needed = [p for p in given if p.default is p.empty]
        if len(needed) != 1 or needed[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise InvalidOption(
                f"task {name!r}: with batch the handler takes one parameter, a list like items: list[Item], got {self._signature}"
            )
        self._list = needed[0].name
        self._positional, self._open_ended = [], False
        self._signature = inspect.Signature([inspect.Parameter(ITEM, inspect.Parameter.POSITIONAL_OR_KEYWORD)])
        with contextlib.suppress(
            NameError, TypeError
        ):  # a name in the annotation may not exist yet: it is read again when needed
            self._hints()

    def _hints(self) -> dict[str, Any]:
        hint = super()._hints().get(self._list, Any)
        if hint is Any or hint in _LISTS:
            return {ITEM: Any}
        if get_origin(hint) not in _LISTS:
            raise InvalidOption(
                f"task {self._name!r}: with batch the handler takes a list, like {self._list}: list[Item], got {shown(hint)}"
            )
        return {ITEM: get_args(hint)[0]}


class ItemReturns(Returns):
    """The result of such a task: an element of what the handler returns, without the errors in it."""

    @functools.cached_property
    def _said_to_return(self) -> Annotation:
        parts = _parts(super()._said_to_return.type)
        lists = [part for part in parts if get_origin(part) in _LISTS]
        if len(lists) != 1:
            return annotation(Any)
        values = [part for part in _parts(get_args(lists[0])[0]) if not _is_error(part)]
        return annotation(Union[tuple(values)] if values else Any)  # noqa: UP007 — of parts that are not known here


def values_of(name: str, returned: Any, count: int) -> list[Any]:
    """Return what a call returned for each of its tasks. Raises `UnstorableValue` unless it is a list of that length."""
    if returned is None:
        return [None] * count
    if isinstance(returned, (list, tuple)) and len(returned) == count:
        return list(returned)
    got = f"{len(returned)}" if isinstance(returned, (list, tuple)) else type(returned).__name__
    raise UnstorableValue(
        f"task {name!r}: the handler returned {got} for a batch of {count} tasks: return a list with one value or exception for "
        "each of them, in order, or None"
    )


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if _is_union(annotation) else (annotation,)


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, type(int | str)) or get_origin(annotation) is Union


def _is_error(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseException)


def _checked(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidOption(f"{name} must be a whole number from {least} to {most}, got {shown(value)}")
    return value
