"""In a set update each document gets the value that is its own, whatever its id and however many there are."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient
from pymongo.collection import Collection

from taskmesh.store.pipeline.by_id import own_value

_NEAR = st.text(
    string.ascii_letters[:3] + "é\U0001f600\x01:.$", max_size=4
)  # near one another, and where bytes and code units differ
_FAR = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
_Ids = Collection[dict[str, Any]]


@pytest.fixture
def ids(mongo_uri: str, database: str) -> Iterator[_Ids]:
    with MongoClient[dict[str, Any]](mongo_uri) as client:
        yield client[database]["ids"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_NEAR | _FAR, unique=True, min_size=1, max_size=120))
def test_each_gets_its_own(ids: _Ids, some: list[str]) -> None:
    ids.delete_many({})
    ids.insert_many([{"_id": id_} for id_ in some])
    ids.update_many({}, [{"$set": {"got": own_value(some, [{"$ne": [id_, n]} for n, id_ in enumerate(some)])}}])
    assert {each["_id"]: each["got"] for each in ids.find()} == {id_: {"$ne": [id_, n]} for n, id_ in enumerate(some)}


@pytest.mark.parametrize("many", [31, 32, 33, 34, 48, 49, 50, 1_000])
def test_each_of_so_many_gets_its_own(ids: _Ids, many: int) -> None:
    some = [f"task:{n}" for n in range(many)]
    ids.insert_many([{"_id": id_} for id_ in some])
    ids.update_many({}, [{"$set": {"got": own_value(some, some)}}])
    assert ids.count_documents({"$expr": {"$eq": ["$_id", "$got"]}}) == many
