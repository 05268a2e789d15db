"""What the tests of the demo share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Shell, shell_in


@pytest.fixture
def taskmesh(mongo_uri: str, database: str, tmp_path: Path) -> Iterator[Shell]:
    """`taskmesh` on the session's MongoDB."""
    with shell_in(tmp_path, mongo_uri, database) as shell:
        yield shell
