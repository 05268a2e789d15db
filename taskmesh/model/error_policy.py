"""Which errors of a handler are retried, and which make its task FAIL for good: `retry_on` and `fail_on`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from taskmesh.model.errors import (
    InvalidOption,
    LeaseLost,
    ProcessDied,
    Retry,
    Snooze,
    StepMismatch,
    TaskFailed,
    TaskSuspended,
    TaskTooLarge,
    UnstorableValue,
)
from taskmesh.model.ids import shown
from taskmesh.model.stage import Next

ErrorTypes = type[BaseException] | Sequence[type[BaseException]]
ALWAYS_FINAL = (TaskFailed, TaskTooLarge, UnstorableValue)
"""Errors that make a task FAIL for good, whatever retries are left. If a result cannot be stored, repeating the work is
useless."""
_SAYS_ITSELF = (Retry, Snooze, Next, TaskSuspended, LeaseLost, StepMismatch)
"""Exceptions that say by themselves how the execution ends."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that was raised, here or in a child process. From there only the names of its classes are known."""

    lineage: tuple[str, ...]
    """The full names of its class and of the base classes, in that order."""
    error: BaseException | None = None
    """None: it was raised in a child process."""

    def is_a(self, kind: type[BaseException]) -> bool:
        """Whether it is of this class, or of one derived from it."""
        return _full_name(kind) in self.lineage if self.error is None else isinstance(self.error, kind)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.lineage[0].rpartition(".")[2] if self.lineage else "an unknown error"


def raised(error: BaseException) -> list[Raised]:
    """Return an error as a policy sees it. For a group of exceptions: those that it contains."""
    return [Raised(tuple(map(_full_name, type(leaf).__mro__)), leaf) for leaf in leaves(error)]


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group, and in nested groups. An error that is no group: itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What a definition says about its handler's errors."""

    retry_on: tuple[type[BaseException], ...] | None = None
    """Only these are retried. None: all."""
    fail_on: tuple[type[BaseException], ...] = ()
    """These make the task FAIL for good, even if they are in `retry_on`, too."""

    @classmethod
    def declared(cls, retry_on: ErrorTypes | None, fail_on: ErrorTypes | None) -> ErrorPolicy:
        """Return the policy that a definition declares. Raises `InvalidOption`."""
        tried_again = None if retry_on is None else _checked("retry_on", retry_on)
        policy = cls(tried_again, () if fail_on is None else _checked("fail_on", fail_on))
        if never := [kind for kind in policy.retry_on or () if issubclass(kind, ALWAYS_FINAL)]:
            raise InvalidOption(
                f"retry_on: {never[0].__name__} makes a task FAIL for good wherever it is raised, so it is never tried again: "
                "leave it out, and raise another error where the task is to be tried again"
            )
        return policy

    def final_because(self, error: BaseException, met: Iterable[Raised]) -> str | None:
        """Return why this error makes the task FAIL for good. None: the policy does not. `met`: as `raised` returns it.

        In a group of exceptions one in `fail_on` suffices, and all have to be in `retry_on`.
        """
        if isinstance(error, (*ALWAYS_FINAL, Retry, Snooze)):
            return None
        for each in met:
            if (found := next((kind for kind in self.fail_on if each.is_a(kind)), None)) is not None:
                same = each.name == found.__name__
                return (
                    f"{each.name} is in fail_on" if same else f"{each.name} is a {found.__name__}, which is in fail_on"
                )
        if self.retry_on is None or isinstance(error, ProcessDied):  # like a lost lease: no handler has raised it
            return None
        left = [each.name for each in met if not any(each.is_a(kind) for kind in self.retry_on)]
        return f"{left[0]} is not in retry_on" if left else None


NO_POLICY = ErrorPolicy()
"""All errors are retried, except for those that never are."""


def _checked(name: str, kinds: Any) -> tuple[type[BaseException], ...]:
    given = (kinds,) if isinstance(kinds, type) else kinds
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InvalidOption(
            f"{name} must be a type of exception or several, like (ValueError, KeyError), got {shown(kinds)}"
        )
    for kind in given:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise InvalidOption(
                f"{name} must name types of exceptions, like (ValueError, KeyError), got {shown(kind)} in it"
            )
        if issubclass(kind, _SAYS_ITSELF):
            raise InvalidOption(f"{name}: {kind.__name__} says by itself how an execution ends: leave it out")
    return tuple(given)


def _full_name(kind: type) -> str:
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"
