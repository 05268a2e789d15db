"""The proxy breaks the network as it says, and else is a wire."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import AutoReconnect, ConnectionFailure, NetworkTimeout

from tests.chaos.proxy import Proxy
from tests.mongod import Mongod
from tests.waiting import wait_until

Client = MongoClient[dict[str, Any]]


@pytest.fixture
def proxy(mongod: Mongod) -> Iterator[Proxy]:
    with Proxy(mongod.port) as started:
        yield started


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    uri = f"mongodb://127.0.0.1:{proxy.port}/?directConnection=true&retryWrites=false&retryReads=false"
    with MongoClient[dict[str, Any]](uri, socketTimeoutMS=500, serverSelectionTimeoutMS=2_000) as connected:
        yield connected


def test_a_healthy_proxy_is_a_wire(client: Client, database: str) -> None:
    client[database].things.insert_many([{"_id": number, "text": "x" * 1_000} for number in range(1_000)])
    assert client[database].things.count_documents({}) == 1_000


def test_a_lost_reply_is_that_of_a_command_which_the_server_has_carried_out(
    client: Client, proxy: Proxy, database: str
) -> None:
    proxy.lose_replies("insert")
    with pytest.raises(AutoReconnect):
        client[database].things.insert_one({"_id": 1})
    assert proxy.lost_replies == 1
    assert client[database].things.find_one() == {"_id": 1}


def test_a_cut_connection_is_an_error_at_once_and_the_next_one_works(client: Client, proxy: Proxy) -> None:
    def is_cut() -> bool:
        client.admin.command("ping")
        proxy.cut()
        try:
            client.admin.command("ping")
        except AutoReconnect:
            return True
        return False  # a driver that has been idle for a second looks whether its connection lives, and opens another

    wait_until(is_cut)
    assert client.admin.command("ping")["ok"]


def test_a_hanging_proxy_answers_nothing_until_it_is_healed(client: Client, proxy: Proxy) -> None:
    client.admin.command("ping")
    proxy.hang(True)
    with pytest.raises(NetworkTimeout):
        client.admin.command("ping")
    proxy.heal()
    assert client.admin.command("ping")["ok"]


def test_a_refusing_proxy_lets_nobody_in(client: Client, proxy: Proxy) -> None:
    client.admin.command("ping")
    proxy.refuse(True)
    with pytest.raises(AutoReconnect):
        client.admin.command("ping")
    with pytest.raises(AutoReconnect):
        client.admin.command("ping")
    proxy.heal()
    assert client.admin.command("ping")["ok"]


def test_who_is_shut_out_by_its_process_id_cannot_connect_and_others_can(
    client: Client, proxy: Proxy, database: str
) -> None:
    proxy.shut_out([1])
    assert client[database].things.find_one() is None
    proxy.shut_out([os.getpid()])
    with pytest.raises(ConnectionFailure):
        client[database].things.find_one()
    proxy.heal()
    assert client[database].things.find_one() is None
