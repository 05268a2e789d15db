"""The form for params, made of the schema that workers register: what is typed into it arrives with its type."""

from __future__ import annotations

import html
import re

import httpx
import pytest

from taskmesh import TaskMesh
from taskmesh.web.param_fields import param_fields, params_from
from tests.web.test_pages import shown, told
from tests.working import working


async def test_a_form_asks_for_what_the_handler_takes(mesh: TaskMesh, client: httpx.AsyncClient) -> None:
    @mesh.task(queue="mail")
    async def send(
        to: str, copies: int = 1, urgent: bool = False, cc: list[str] | None = None, note: str | None = None
    ) -> None:
        """Send a mail."""

    async with working(mesh):
        page = await shown(client, "/tasks?publish=send")
        assert '<option value="send">' in page
        fields = re.findall(r'name="(params[.]\w+[.]\w+)"', page)
        assert fields == [
            "params.text.to",
            "params.json.cc",
            "params.json.copies",
            "params.text.note",
            "params.json.urgent",
        ]
        typed = {"text.to": "7", "json.copies": "3", "json.urgent": "true", "json.cc": "", "text.note": ""}
        form = {"name": "send", **{f"params.{field}": value for field, value in typed.items()}}
        assert "good: published" in await told(client, "tasks.publish", key="k", **form)
        wrong = {**form, "params.json.copies": "three"}
        assert "copies must be JSON, got 'three'" in html.unescape(
            await told(client, "tasks.publish", key="l", **wrong)
        )
    found = await mesh.get("send", "k")
    assert found.params == {"to": "7", "copies": 3, "urgent": True, "cc": None, "note": None}
    assert found.queue == "mail"
    moved = await client.get("/publish?name=send&key=x")
    assert moved.headers["location"] == "/tasks?publish=send#publish"


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, {"properties": 3}])
def test_a_schema_that_names_no_params_asks_for_json(schema: object) -> None:
    assert param_fields(schema) is None


def test_any_schema_makes_a_form() -> None:
    made = param_fields(
        {
            "properties": {
                "a": True,
                "b": {"enum": ["x", 1]},
                "c.d": {"$ref": "#/$defs/C"},
                "e": {"anyOf": [{}, {}]},
                "f": {"anyOf": 3},
            },
            "required": 7,
        }
    )
    assert made is not None
    assert [(each.field, each.input) for each in made] == [
        ("params.json.a", "json"),
        ("params.json.b", "select"),
        ("params.json.c.d", "json"),
        ("params.json.e", "json"),
        ("params.json.f", "json"),
    ]
    assert made[1].choices == ('"x"', "1")
    assert params_from({"params.json.c.d": "[1]", "key": "k"}) == ({"c.d": [1]}, {"key": "k"})
