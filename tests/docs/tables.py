"""Tables in our documents, for the tests that do what each cell says."""

from __future__ import annotations

import re

from tests.docs.examples import ROOT

Row = dict[str, str]
_CELL = re.compile(r"(?<!\\)\|")


def table(document: str, *columns: str) -> list[Row]:
    """Return the rows of the table whose header has exactly these columns, each as a dict by column."""
    lines = (ROOT / document).read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        if _cells(line) == list(columns):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(columns, _cells(row), strict=True)))
            return rows
    raise AssertionError(f"{document} has no table with the columns {columns}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _CELL.split(line)[1:-1]] if line.startswith("|") else []
