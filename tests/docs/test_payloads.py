"""The code of docs/payloads.md works."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, SecretStr
from pymongo import AsyncMongoClient

from taskmesh import AESCodec, TaskMesh, current_task
from tests.docs.examples import ROOT, examples_in
from tests.docs.running import run

DOCUMENT = "docs/payloads.md"
EXAMPLES = {example.about: example for example in examples_in(DOCUMENT)}


def test_every_block_is_run_by_a_test() -> None:
    assert (ROOT / DOCUMENT).read_text("utf-8").count("```python") == len(EXAMPLES)
    assert set(EXAMPLES) == {"encrypt", "secret", "large"}


async def test_what_is_encrypted_comes_back(mongo_uri: str, database: str) -> None:
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        code = EXAMPLES["encrypt"].in_place.replace('database="app"', f"database={database!r}")
        namespace = {"AESCodec": AESCodec, "TaskMesh": TaskMesh, "client": client, "current_task": current_task}
        assert await run(code, namespace, DOCUMENT) == {"card": "4111 1111 1111 1111", "cents": 500}


async def test_a_secret_is_not_shown(mongo_uri: str, database: str) -> None:
    namespace = {
        "BaseModel": BaseModel,
        "SecretStr": SecretStr,
        "current_task": current_task,
        "mesh": TaskMesh(mongo_uri, database=database),
    }
    shown = await run(EXAMPLES["secret"].in_place, namespace, DOCUMENT)
    assert repr(shown) == "{'login': Secret('**********'), 'token': Secret('**********')}"


async def test_what_is_large_comes_back(mongo_uri: str, database: str) -> None:
    async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
        code = EXAMPLES["large"].in_place.replace('database="app"', f"database={database!r}")
        assert await run(code, {"TaskMesh": TaskMesh, "client": client}, DOCUMENT) == bytes(200_000)
