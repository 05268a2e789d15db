"""What a task waits for, as its publisher says: `after=` and `on_dependency_failure=`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeGuard

from taskmesh.model.errors import InvalidOption
from taskmesh.model.ids import shown
from taskmesh.model.task import task_id

OnDependencyFailure = Literal["fail", "wait", "run"]
_POLICIES: tuple[OnDependencyFailure, ...] = ("fail", "wait", "run")


class Named(Protocol):
    """A task identified by its name and key: a `TaskHandle`, a member of a flow."""

    # ruff: noqa: D102 — documented at `TaskHandle`

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...


def is_named(value: object) -> TypeGuard[Named]:
    """Whether it has a name and a key. Asking a protocol takes ten times as long, and there may be ten thousand."""
    return hasattr(value, "name") and hasattr(value, "key")


Dependency = Named | tuple[str, str]
"""A handle, or a pair of name and key."""
Dependencies = Iterable[Dependency] | Mapping[str, Dependency]
"""What `after=` takes. A mapping names, for each dependency, the param that gets its result."""


@dataclass(frozen=True, slots=True)
class FromDependency:
    """Marks a handler's param that gets the result of a dependency: `Annotated[Report, FromDependency]`.

    Without a name the task has to wait for exactly one other. With `name` and `key`, it is the result of that one.
    """

    name: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.name is None) != (self.key is None):
            raise InvalidOption("FromDependency takes a name and a key, or neither: FromDependency('load', 'part-1')")
        if self.name is not None and self.key is not None:
            task_id(self.name, self.key)

    @property
    def id(self) -> str | None:
        """The `_id` of the task that it names. None: the only one."""
        return None if self.name is None or self.key is None else task_id(self.name, self.key)


@dataclass(frozen=True, slots=True)
class After:
    """The tasks that a task waits for, each once, in the order given."""

    ids: tuple[str, ...] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    """By param of the handler, the `_id` of the task whose result it gets."""

    def __bool__(self) -> bool:
        return bool(self.ids)

    def stored(self) -> dict[str, Any]:
        """Return what `task_state` keeps of it."""
        return {"after": {"ids": list(self.ids), "params": [[param, id_] for param, id_ in self.params.items()]}}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> After:
        """Read what `task_state.after` contains."""
        return cls(tuple(stored["ids"]), dict(stored["params"]))

    def as_data(self) -> Any:
        """Return it as plain values, which `checked_after` accepts."""
        if self.params:
            return {param: _parts(id_) for param, id_ in self.params.items()}
        return [_parts(id_) for id_ in self.ids]


def checked_after(after: Any) -> After | None:
    """Return what `after=` means. Raises `InvalidOption`, `InvalidName`, `InvalidKey`."""
    if after is None or isinstance(after, After):
        return after
    if isinstance(after, Mapping):
        if wrong := [param for param in after if not isinstance(param, str)]:
            raise InvalidOption(f"after must name params by str, got {shown(wrong[0])}: pass {{'param': handle}}")
        params = {param: dependency_id(each) for param, each in after.items()}
        return After(tuple(dict.fromkeys(params.values())), params)
    if isinstance(after, (str, bytes)) or is_named(after) or not isinstance(after, Iterable):
        raise InvalidOption(
            f"after must be a list of handles or (name, key) pairs, or a dict of them by param, got {shown(after)}: "
            "pass after=[handle]"
        )
    return After(tuple(dict.fromkeys(map(dependency_id, after))))


def dependency_id(dependency: Any) -> str:
    """Return the `_id` of a dependency. Raises `InvalidOption` for what identifies no task, `InvalidName`, `InvalidKey`."""
    if is_named(dependency):
        return task_id(dependency.name, dependency.key)
    if isinstance(dependency, (tuple, list)) and len(dependency) == 2 and isinstance(dependency[0], str):
        return task_id(*dependency)
    raise InvalidOption(
        f"a dependency must be a handle, or a name and a key like ('load', 'part-1'), got {shown(dependency)}"
    )


def checked_policy(policy: Any) -> OnDependencyFailure:
    """Return what `on_dependency_failure=` says. Raises `InvalidOption`."""
    for known in _POLICIES:
        if policy == known:
            return known
    raise InvalidOption(f"on_dependency_failure must be 'fail', 'wait' or 'run', got {shown(policy)}")


def label(id_: str) -> str:
    """Return how a task is named in a message."""
    name, _, key = id_.partition(":")
    return f"{name!r} {key!r}"


def _parts(id_: str) -> list[str]:
    name, _, key = id_.partition(":")
    return [name, key]
