"""`demo`: a real job, a killed worker, every result checked."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from taskmesh.cli import output
from taskmesh.cli.connected import Database, Uri

_SHOWN = 5


def demo(
    files: Annotated[int | None, typer.Option(min=20, help="Only so many files.")] = None,
    workers: Annotated[int, typer.Option(min=2, help="How many worker processes.")] = 3,
    keep: Annotated[bool, typer.Option("--keep", help="Leave what it makes there, to look at.")] = False,
    uri: Uri = None,
    database: Database = None,
) -> None:
    """Tokenize Python's standard library with three workers, kill one half-way, and check every result.

    In a database of its own, or in collections of its own in the one that is named; they are dropped at the end.
    """
    from taskmesh.demo import Job  # noqa: PLC0415  # other commands need not load it

    report = asyncio.run(Job(uri=uri, database=database, files=files, workers=workers, keep=keep).run())
    facts: list[tuple[str, object]] = [
        ("files", report.files),
        ("lines", f"{report.lines:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("executions", report.executions),
        ("preempted", report.preempted),
        ("seconds", f"{report.seconds:.1f}"),
    ]
    console = output.console()
    console.print()
    console.print(output.table(["", "TOTAL"], facts))
    console.print()
    workers_seen = sorted(report.executed_by | report.finished_by)
    rows = [
        [name, report.executed_by[name], report.finished_by[name], "killed" if name == report.killed else "stopped"]
        for name in workers_seen
    ]
    console.print(output.table(["WORKER", "EXECUTED", "RECORDED", "END"], rows))
    console.print()
    moved = [f"{key} ({report.killed} → {winner})" for key, winner in report.moved.items() if key in report.held]
    output.say(f"taken over from {report.killed}: {', '.join(moved) or 'nothing'}")
    if report.problems:
        for problem in report.problems[:_SHOWN]:
            output.say(f"WRONG: {problem}", stderr=True)
        output.say(f"{len(report.problems)} things are wrong", stderr=True)
        raise typer.Exit(1)
    output.say(
        f"every one of {report.files} results equals the direct computation; nothing lost, nothing recorded twice"
    )
