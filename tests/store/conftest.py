"""For the least privileges: a server as production has it: TLS alone, and nobody comes in without a password."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import PyMongoError

from tests.mongods import quick_directory, small_mongod
from tests.waiting import wait_until

PASSWORD = "s3cret/with@signs:"
QUOTED_PASSWORD = "s3cret%2Fwith%40signs%3A"


@dataclass(frozen=True)
class Secured:
    """The server, and what a client needs to reach it."""

    port: int
    ca: Path

    def uri(self, user: str, password: str = QUOTED_PASSWORD) -> str:
        return (
            f"mongodb://{user}:{password}@localhost:{self.port}/?authSource=admin&tls=true&tlsCAFile={self.ca}"
            "&directConnection=true&appname=taskmesh"
        )

    @contextmanager
    def admin(self) -> Iterator[MongoClient[dict[str, Any]]]:
        with MongoClient[dict[str, Any]](self.uri("root")) as client:
            yield client

    def add_user(self, name: str, roles: list[Any]) -> None:
        with self.admin() as client:
            client.admin.command("createUser", name, pwd=PASSWORD, roles=roles)


@pytest.fixture(scope="package")
def secured() -> Iterator[Secured]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make certificates")
    with quick_directory() as directory:
        yield from _secured(directory)


def _secured(directory: Path) -> Iterator[Secured]:
    ca, certificate = _certificates(directory)
    key_file = directory / "key"
    key_file.write_text("the servers know each other by this")
    key_file.chmod(0o400)
    mongod = small_mongod(directory / "db")
    with mongod:
        mongod.initiate()
        with MongoClient[dict[str, Any]](mongod.uri) as client:
            client.admin.command("createUser", "root", pwd=PASSWORD, roles=["root"])
        command, port = [*mongod._command, "--port", str(mongod.port)], mongod.port
        mongod.stop()
    command += ["--auth", "--keyFile", str(key_file), "--tlsMode", "requireTLS", "--tlsCAFile", str(ca)]
    command += ["--tlsCertificateKeyFile", str(certificate), "--tlsAllowConnectionsWithoutCertificates"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Secured(port, ca)
        wait_until(lambda: _is_primary(server), 60.0, what="the secured server accepts writes")
        yield server
    finally:
        process.kill()
        process.wait()


def _is_primary(server: Secured) -> bool:
    with suppress(PyMongoError), server.admin() as client:
        return bool(client.admin.command("hello")["isWritablePrimary"])
    return False


def _certificates(directory: Path) -> tuple[Path, Path]:
    """Make an authority, and a server's certificate and key in one file as MongoDB wants them."""
    ca, ca_key, request = directory / "ca.pem", directory / "ca.key", directory / "server.csr"
    key, certificate, names = directory / "server.key", directory / "server.crt", directory / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    _openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/O=tests/CN=authority")
    _openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/O=tests/CN=localhost")
    signed_by = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial"]
    _openssl("x509", "-req", "-in", request, *signed_by, "-out", certificate, "-days", "2", "-extfile", names)
    both = directory / "server.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return ca, both


def _openssl(*arguments: object) -> None:
    subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, env={**os.environ, "RANDFILE": ""}
    )
