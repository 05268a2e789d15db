"""The tools of mutation: change one place of an expression, of a function's result, or of what a verb sends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import Any

import pytest

from taskmesh.store import control, store
from tests.properties import world

Mutant = Callable[[pytest.MonkeyPatch], None]
ANYTHING: Any = object()
_verb_under_way: ContextVar[str] = ContextVar("verb under way", default="")

_OTHER_OPERATOR = {
    "$gt": "$gte",
    "$gte": "$gt",
    "$lt": "$lte",
    "$lte": "$lt",
    "$eq": "$ne",
    "$ne": "$eq",
    "$min": "$max",
    "$max": "$min",
    "$and": "$or",
    "$or": "$and",
    "$add": "$subtract",
    "$subtract": "$add",
}
_OTHER_WORD = {
    "RUNNING": "FAIL",
    "SUCCESS": "RUNNING",
    "FAIL": "SUCCESS",
    "INIT": "RUNNING",
    "task": "worker",
    "worker": "task",
}
_PATHS = ("$task_state.", "$task_option.", "$$this.", "$$last.")
_ONE_OF = ("$cond", "$ifNull", "$not")
"""Operators of which one part can stand for the whole."""


def points(expression: Any) -> Iterator[tuple[str, Any]]:
    """Yield every expression that differs from this one in one place, with a word on what was changed."""
    if isinstance(expression, dict):
        for name, value in expression.items():
            if name != "$literal":
                yield from _points_of_operator(name, value)
                yield from ((f"{name} > {what}", {**expression, name: other}) for what, other in points(value))
    elif isinstance(expression, list):
        for place, part in enumerate(expression):
            for what, other in points(part):
                yield f"[{place}] {what}", [*expression[:place], other, *expression[place + 1 :]]
    elif type(expression) is int:
        yield f"{expression} → {expression + 1}", expression + 1
    elif isinstance(expression, str) and expression in _OTHER_WORD:
        yield f"{expression} → {_OTHER_WORD[expression]}", _OTHER_WORD[expression]
    elif isinstance(expression, str) and expression.startswith(_PATHS):
        yield f"{expression} → null", None


def _points_of_operator(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if (other := _OTHER_OPERATOR.get(name)) and not (name == "$add" and len(value) != 2):
        yield f"{name} → {other}", {other: value}
    if name in _ONE_OF:
        parts = value[1:] if name == "$cond" else value
        yield from ((f"{name} → {part!r:.60}", part) for part in parts if part != "$$REMOVE")
    if name == "$filter":
        yield "$filter without a condition", {name: {**value, "cond": True}}


def changed(value: Any, old: Any, new: Any) -> Any:
    """`value` with every key, string, number or sub-expression that equals `old` replaced; `ANYTHING` fits everything."""
    if _fits(value, old):
        return new
    if isinstance(value, dict):
        return {
            (new if isinstance(old, str) and name == old else name): changed(part, old, new)
            for name, part in value.items()
        }
    return [changed(part, old, new) for part in value] if isinstance(value, list) else value


def _fits(value: Any, pattern: Any) -> bool:
    if pattern is ANYTHING:
        return True
    if isinstance(pattern, dict) and isinstance(value, dict):
        return pattern.keys() == value.keys() and all(_fits(value[name], pattern[name]) for name in pattern)
    if isinstance(pattern, list) and isinstance(value, list):
        return len(pattern) == len(value) and all(map(_fits, value, pattern))
    return type(value) is type(pattern) and bool(value == pattern)


def replaced(module: Any, name: str, value: Any) -> Mutant:
    """Something else in the place of a function or a constant."""
    return lambda patch: patch.setattr(module, name, value)


def constant(module: Any, name: str, old: Any, new: Any) -> Mutant:
    """A change inside a constant expression."""
    mutated = changed(getattr(module, name), old, new)
    assert mutated != getattr(module, name), f"{name} has no {old!r}"
    return replaced(module, name, mutated)


def result(module: Any, name: str, old: Any, new: Any) -> Mutant:
    """A change inside what a function returns."""
    original = getattr(module, name)

    def mutated(*arguments: Any, **named: Any) -> Any:
        return changed(original(*arguments, **named), old, new)

    return replaced(module, name, mutated)


def sent(verb: str, change: Callable[[Any, Any], tuple[Any, Any]]) -> Mutant:
    """A change to the query and the pipeline that a verb sends."""
    home = control if hasattr(control, verb) else world
    original = getattr(home, verb)

    async def marked(*arguments: Any, **named: Any) -> Any:
        _verb_under_way.set(verb)  # each operation runs in an asyncio task, and so in a context, of its own
        return await original(*arguments, **named)

    def marked_in_a_thread(*arguments: Any, **named: Any) -> Any:
        _verb_under_way.set(verb)
        return original(*arguments, **named)

    def mutated(send: Callable[..., Any]) -> Callable[..., Any]:
        def command(store: Any, query: Any, pipeline: Any, *rest: Any, **named: Any) -> Any:
            if _verb_under_way.get() == verb:
                query, pipeline = change(copy.deepcopy(query), copy.deepcopy(pipeline))
            return send(store, query, pipeline, *rest, **named)

        return command

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(home, verb, marked if iscoroutinefunction(original) else marked_in_a_thread)
        for name in ("update_command", "update_one"):  # of many tasks, and of one that is read as it was written
            patch.setattr(store.Store, name, mutated(getattr(store.Store, name)))

    return apply


def unguarded(verb: str, condition: str) -> Mutant:
    """A verb without one of the conditions of its query."""

    def change(query: Any, pipeline: Any) -> tuple[Any, Any]:
        return {name: value for name, value in query.items() if name != condition}, pipeline

    return sent(verb, change)


def written(verb: str, old: Any, new: Any) -> Mutant:
    """A verb that writes something else."""
    return sent(verb, lambda query, pipeline: (query, changed(pipeline, old, new)))
