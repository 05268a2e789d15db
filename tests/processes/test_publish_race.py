"""Whoever and how many publish one key at the same time: there is one task, and one of them created it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection

from tests.waiting import wait_until

_PROCESSES, _EACH = 4, 250


@pytest.mark.slow
def test_t36_a_thousand_publishes_of_one_key_from_several_processes_create_it_once(
    mongo_uri: str, database: str, documents: Collection[dict[str, Any]], tmp_path: Path
) -> None:
    start = tmp_path / "start"
    publishers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.publisher", mongo_uri, database, str(_EACH), str(start)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(_PROCESSES)
    ]
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == _PROCESSES, what="all are connected")
        start.touch()
        answers = [publisher.communicate(timeout=60) for publisher in publishers]
    finally:
        for publisher in publishers:
            publisher.kill()
            publisher.wait()
    assert [publisher.returncode for publisher in publishers] == [0] * _PROCESSES, answers
    assert sum(int(created) for created, _ in answers) == 1
    assert documents.count_documents({}) == 1
