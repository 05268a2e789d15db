"""What the tests of the rule and the verbs ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.properties.life import Life, a_life
from tests.properties.shelf import Shelf, a_shelf


@pytest.fixture
async def life(mongo_uri: str, database: str) -> AsyncIterator[Life]:
    """The task `job:1` in a collection of its own, and the means to let time pass."""
    async with a_life(mongo_uri, database) as life:
        yield life


@pytest.fixture
async def shelf(mongo_uri: str, database: str) -> AsyncIterator[Shelf]:
    """Random documents as they were left at `BEGIN`, and an oracle for each."""
    async with a_shelf(mongo_uri, database) as shelf:
        yield shelf
