"""A child process finds the handler that it is to run, or says what would help."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from taskmesh import TaskError, TaskMesh, TaskOption
from taskmesh.consumer.subprocess.handler_reference import _imported
from tests.working import working


async def test_a_handler_that_no_child_can_find_fails_with_what_to_do(mesh: TaskMesh) -> None:
    lock = __import__("threading").Lock()

    @mesh.task(run="process", option=TaskOption(max_unexpected_retries=0))
    def local() -> None:
        lock.acquire()

    async with working(mesh):
        handle = await local.publish("k")
        with pytest.raises(TaskError, match="at the top of a module"):
            await handle.result(60)


def test_what_cannot_be_imported_by_name_is_loaded_from_its_file(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin_elsewhere.py"
    plugin.write_text("answer = 42")
    try:
        assert _imported("plugin_elsewhere", str(plugin)).answer == 42
    finally:
        sys.modules.pop("plugin_elsewhere", None)
    with pytest.raises(ModuleNotFoundError):
        _imported("plugin_nowhere", None)
