"""What counts as trouble that passes, as the real driver and server tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError

from taskmesh.store.mongodb.server_errors import is_passing
from tests.mongods import small_mongod


@pytest.mark.blocks_the_loop  # a server is started and ended by blocking calls
async def test_a_server_that_is_not_a_member_yet_has_no_sessions_for_the_moment(tmp_path: Path) -> None:
    """As a primary is that was killed and is started again: a pool may connect to it before it knows its replica set."""
    with small_mongod(tmp_path / "starting") as server:
        uri = f"mongodb://{server.address}"
        async with (
            AsyncMongoClient[dict[str, Any]](uri, directConnection=True) as client,
            client.start_session() as own,
        ):
            with pytest.raises(ConfigurationError) as caught:
                await client.test.command({"find": "tasks"}, session=own)
    assert is_passing(caught.value)
    assert not is_passing(ConfigurationError("Unable to find a srv record"))
