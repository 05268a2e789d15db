"""A type checker finds what a user gets wrong, where the user wrote it, and nothing in what is right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from taskmesh.model.configuration import Configuration, PublishSettings
from taskmesh.model.option import OptionFields, TaskOption

HERE = Path(__file__).parent


@pytest.fixture(scope="session", params=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, int]]:
    """File and line of all that a checker says of both files by its strictest rules, as for a user, without our settings."""
    if request.param == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir=../../.mypy_cache/typing"]
        return _errors([*command, "accepted.py", "refused.py"], HERE, r"^(\w+\.py):(\d+): error:")
    # Pyright as it comes from PyPI alone; in the mode "strict" its rules are pyright's own.
    pyright = str(Path(sys.executable).with_name("basedpyright"))
    project = tmp_path_factory.mktemp("pyright")
    for file in ("accepted.py", "refused.py"):
        shutil.copy(HERE / file, project)
    (project / "pyrightconfig.json").write_text('{"include": ["."], "typeCheckingMode": "strict"}', "utf-8")
    return _errors([pyright, "--pythonpath", sys.executable], project, r"(\w+\.py):(\d+):\d+ - error:")


def _errors(command: list[str], where: Path, pattern: str) -> set[tuple[str, int]]:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300, check=False)
    found = {(file, int(line)) for file, line in re.findall(pattern, done.stdout, re.MULTILINE)}
    assert found, done.stdout + done.stderr
    return found


def test_every_wrong_line_is_refused_and_no_other(errors: set[tuple[str, int]]) -> None:
    lines = (HERE / "refused.py").read_text("utf-8").splitlines()
    assert errors == {("refused.py", number) for number, line in enumerate(lines, 1) if line.endswith("# refused")}


def test_every_option_can_be_given_by_its_type() -> None:
    assert OptionFields.__annotations__.keys() == TaskOption.model_fields.keys()
    assert get_type_hints(OptionFields).keys() == TaskOption.model_fields.keys()


def test_every_setting_of_a_publish_can_be_given_by_its_type() -> None:
    own = Configuration.__dataclass_fields__.keys() - {"option", "tuned", "placed"}
    assert get_type_hints(PublishSettings).keys() == own | TaskOption.model_fields.keys()
