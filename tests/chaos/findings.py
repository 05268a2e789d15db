"""What a checker found: how often each invariant was put to the test, and every violation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from tests.chaos.invariants import INVARIANTS


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    invariant: str
    task: str
    what: str

    def __str__(self) -> str:
        return f"[{self.invariant}] {INVARIANTS[self.invariant]}: {self.task}: {self.what}"


@dataclass
class Findings:
    """The result of a check."""

    checked: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def check(self, invariant: str, task: str, holds: bool, what: object = "") -> bool:
        """Count one decision; a promise that does not hold is kept with what shows it."""
        assert invariant in INVARIANTS
        self.checked[invariant] += 1
        if not holds:
            self.violations.append(Violation(invariant, task, str(what)))
        return holds

    def __iadd__(self, other: Findings) -> Self:
        self.checked += other.checked
        self.violations += other.violations
        return self

    @property
    def broken(self) -> set[str]:
        """The names of the invariants that do not hold."""
        return {violation.invariant for violation in self.violations}
