"""The site of examples/django, visited: `python -m unittest tests.integrations.django_site`. Needs Django 6."""

from __future__ import annotations

import asyncio
import unittest
from typing import Any

import django

django.setup()

# ruff: noqa: E402 — after Django is set up
# ruff: noqa: PT009 — run by unittest, since the environments of other Djangos have no pytest
from django.test import Client

from taskmesh import TaskMesh
from taskmesh.integrations import django as integration


async def work(mesh: TaskMesh) -> None:
    """Do what there is, as a worker does."""
    async with mesh:
        await mesh.consumer().run(until_idle=True)


class Site(unittest.TestCase):
    def test_what_pages_enqueue_is_run_and_shown(self) -> None:
        visitor = Client()
        text: Any = visitor.post("/texts", "a rose is a rose", content_type="text/plain")
        person: Any = visitor.post("/people", {"name": "Ada"})
        self.assertEqual((text.status_code, person.status_code), (202, 202))
        self.assertEqual(visitor.get(text.json()["result"]).json()["status"], "READY")
        asyncio.run(work(integration.mesh))
        shown = [visitor.get(page.json()["result"]).json() for page in (text, person)]
        self.assertEqual([page["status"] for page in shown], ["SUCCESSFUL", "SUCCESSFUL"])
        self.assertEqual([page["value"] for page in shown], [{"a": 2, "rose": 2, "is": 1}, "Dear Ada,"])
        self.assertEqual(visitor.get("/results/none").status_code, 404)

    @classmethod
    def tearDownClass(cls) -> None:
        integration.mesh.publisher.close_sync()
