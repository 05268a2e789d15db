"""The examples in our documents: what they say that one types, and what they say that comes out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^<!-- example: (?P<about>\S+) -->\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A block that is marked as an example: a file to write (`about` is its name), or commands (`run`)."""

    about: str
    text: str
    line: int
    """How many lines the document has before it."""

    @property
    def in_place(self) -> str:
        """Its text behind as many empty lines as the document has before it: so an error names the right one."""
        return "\n" * self.line + self.text

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each command with the lines that it must print, among others."""
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
        return found


def examples_in(document: str) -> list[Example]:
    """Return the examples of a document, in order."""
    text = (ROOT / document).read_text("utf-8")
    return [
        Example(match["about"], match["text"], text.count("\n", 0, match.start("text")))
        for match in _BLOCK.finditer(text)
    ]
