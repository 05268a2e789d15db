"""The engine does its whole work with the role that docs/operating.md names, on a server with TLS and passwords."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from taskmesh import TaskMesh, TaskMeshError
from tests.chaos.life import EXPECTED_RUNS, live
from tests.store.conftest import PASSWORD, QUOTED_PASSWORD, Secured

pytestmark = pytest.mark.slow  # a server of its own kind, and a whole life on it

_OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


def documented_role(database: str) -> dict[str, Any]:
    """The role as the document has it, for another database."""
    [block] = re.findall(r"```js\ndb\.createRole\((\{.*?\})\)\n```", _OPERATING.read_text(), re.DOTALL)
    role: dict[str, Any] = json.loads(block.replace('"taskmesh"', json.dumps(database)))
    return role


def with_role(secured: Secured, database: str, role: dict[str, Any]) -> str:
    """Make the role, and a user who has no other; return the user's URI."""
    with secured.admin() as client:
        client[database].command("createRole", role["role"], privileges=role["privileges"], roles=role["roles"])
    secured.add_user(f"user_of_{database}", [{"role": role["role"], "db": database}])
    return secured.uri(f"user_of_{database}")


async def test_the_documented_role_is_enough_for_everything(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    uri = with_role(secured, "enough", documented_role("enough"))
    with caplog.at_level(logging.WARNING, "taskmesh"):
        life = await live(uri, "enough")

    assert {key: life.runs[key] for key in EXPECTED_RUNS} == EXPECTED_RUNS
    assert life.told == []
    assert [r.getMessage() for r in caplog.records if "authorized" in r.getMessage()] == []
    assert life.effects == 1, "a handler's own writes, in the same database"


async def test_and_for_nothing_else(secured: Secured) -> None:
    uri = with_role(secured, "confined", documented_role("confined"))
    with MongoClient[dict[str, Any]](uri) as client:
        attempts: list[Callable[[], object]] = [
            client["another"]["tasks"].find_one,
            client["confined"]["tasks"].drop,
            lambda: client["confined"].command("dropDatabase"),
            lambda: client.admin.command("serverStatus"),
        ]
        for attempt in attempts:
            with pytest.raises(OperationFailure, match="not authorized"):
                attempt()


async def test_the_doctor_says_what_it_may_not_see(secured: Secured) -> None:
    async with TaskMesh(with_role(secured, "examined", documented_role("examined")), database="examined") as mesh:
        assert await mesh.inspect.doctor()


async def test_credentials_are_in_no_log_and_no_error(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secured.add_user("nobody", [])
    for user, password in (("nobody", QUOTED_PASSWORD), ("root", "not" + QUOTED_PASSWORD)):
        mesh = TaskMesh(secured.uri(user, password), database="app")
        with pytest.raises((TaskMeshError, OperationFailure)) as failure:
            await mesh.connect()
        for text in (str(failure.value), repr(failure.value), repr(mesh), *(r.getMessage() for r in caplog.records)):
            assert PASSWORD not in text
            assert QUOTED_PASSWORD not in text


async def test_a_wrong_password_is_told_in_a_sentence(secured: Secured) -> None:
    mesh = TaskMesh(secured.uri("root", "not" + QUOTED_PASSWORD), database="app")
    with pytest.raises(TaskMeshError) as failure:
        await mesh.connect()
    said = str(failure.value)
    assert re.fullmatch(
        r"the MongoDB at \S+ refuses user 'root' with this password: correct user, password or authSource in the URI",
        said,
    )
