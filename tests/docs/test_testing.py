"""The code of docs/testing.md works, as its readers' own project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import examples_in

FILES = {example.about: example.text for example in examples_in("docs/testing.md")}


@pytest.mark.slow
def test_the_tests_of_handlers_pass_on_the_mongodb_that_comes_along(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TASKMESH_", "PYTEST_"))}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "test_shop.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "7 passed" in ended.stdout
    assert not (tmp_path / ".taskmesh").exists(), "nothing is left beside the tests"
