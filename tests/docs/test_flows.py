"""The blocks of docs/flows.md work."""

from __future__ import annotations

from typing import Annotated

import pytest

from taskmesh import FromDependency, Next, TaskMesh, current_task
from tests.docs.examples import examples_in
from tests.docs.running import run

DOCUMENT = "docs/flows.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}


@pytest.mark.parametrize("example", sorted(EXAMPLES))
async def test_a_block_runs(mesh: TaskMesh, example: str) -> None:
    given = {
        "mesh": mesh,
        "Annotated": Annotated,
        "FromDependency": FromDependency,
        "Next": Next,
        "current_task": current_task,
    }
    await run(EXAMPLES[example].in_place, given, DOCUMENT)
