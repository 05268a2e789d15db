"""The peers: how each is started, tuned as its own documentation advises, and what it promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = HERE / ".environment"
"""Where the peers' own packages are: see `install.py`."""


@dataclass(frozen=True)
class Peer:
    """Another task engine."""

    name: str
    broker: str
    promise: str
    workers: Callable[[int], list[list[str]]]
    """The commands of its worker processes, for so many of them."""
    publisher: list[str]
    """The command that publishes; COUNT and PAUSE are added."""
    count: int
    """How many tasks its backlog has: enough for some seconds."""
    needs: Path
    """What is there if it is installed."""
    version: Callable[[], str]
    language: str = "Python"
    directory: Path = HERE / "python"
    publish_first: bool = True
    """False: the workers must be there before the tasks are."""


def _venv(name: str) -> Path:
    return ENVIRONMENT / "envs" / name / "bin" / "python"


def _python_version(name: str, *packages: str) -> Callable[[], str]:
    def read() -> str:
        site = next((ENVIRONMENT / "envs" / name / "lib").glob("python*/site-packages"))
        found = []
        for package in packages or (name,):
            info = next(site.glob(f"{package.replace('-', '_')}-*.dist-info"))
            found.append(info.name.removesuffix(".dist-info").replace("_", "-"))
        return ", ".join(found)

    return read


def _python(
    name: str,
    broker: str,
    promise: str,
    count: int,
    workers: Callable[[str, int], list[list[str]]],
    *packages: str,
) -> Peer:
    python = str(_venv(name))
    script = str(HERE / "python" / f"{name}_peer.py")
    return Peer(
        name,
        broker,
        promise,
        lambda processes: workers(python, processes),
        [python, script],
        count,
        _venv(name),
        _python_version(name, *packages),
    )


def _each(script: str) -> Callable[[str, int], list[list[str]]]:
    """One command for each process."""
    return lambda python, processes: [[python, str(HERE / "python" / script), "work"]] * processes


def _npm_version(name: str, package: str) -> Callable[[], str]:
    def read() -> str:
        text = (ENVIRONMENT / "node" / "node_modules" / package / "package.json").read_text()
        return f"{name}-{json.loads(text)['version']}"

    return read


def _fixed(text: str) -> Callable[[], str]:
    return lambda: text


def _node(name: str, broker: str, promise: str, count: int, package: str | None = None) -> Peer:
    script, package = str(ENVIRONMENT / "node" / f"{name}.mjs"), package or name
    return Peer(
        name,
        broker,
        promise,
        lambda processes: [["node", script, "work"]] * processes,
        ["node", script],
        count,
        ENVIRONMENT / "node" / "node_modules" / package,
        _npm_version(name, package),
        "Node",
        HERE / "node",
    )


def _binary(name: str, broker: str, promise: str, count: int, program: Path, version: str, language: str) -> Peer:
    return Peer(
        name,
        broker,
        promise,
        lambda processes: [[str(program), "work"]] * processes,
        [str(program)],
        count,
        program,
        _fixed(version),
        language,
        HERE,
        publish_first=name != "mscheduler",
    )


_REDIS = "tasks in Redis' memory: a crash of the server loses what its snapshots lack"
PEERS: list[Peer] = [
    _python(
        "dramatiq",
        "redis",
        f"{_REDIS}; acknowledged after the run, retried; keys not unique",
        20_000,
        lambda python, n: [
            [python, "-m", "dramatiq", "dramatiq_peer", "--processes", str(n), "--threads", "1", "--skip-logging"]
        ],
    ),
    _python(
        "taskiq",
        "redis",
        f"{_REDIS}; popped before the run: a killed worker loses its tasks; keys not unique",
        20_000,
        lambda python, n: [
            [
                python,
                "-m",
                "taskiq",
                "worker",
                "taskiq_peer:broker",
                "--workers",
                str(n),
                "--max-async-tasks",
                "500",
                "--log-level",
                "ERROR",
                "--ack-type",
                "when_received",
            ]
        ],
        "taskiq",
        "taskiq-redis",
    ),
    _python(
        "celery",
        "redis",
        f"{_REDIS}; acknowledged before the run (its default); keys not unique",
        5_000,
        lambda python, n: [
            [
                python,
                "-m",
                "celery",
                "-A",
                "celery_peer",
                "worker",
                "-c",
                str(n),
                "--without-gossip",
                "--without-mingle",
                "--without-heartbeat",
                "-l",
                "ERROR",
            ]
        ],
    ),
    _python("rq", "redis", f"{_REDIS}; a killed worker's job is failed after its timeout", 2_500, _each("rq_peer.py")),
    _python(
        "huey",
        "redis",
        f"{_REDIS}; popped before the run: a killed worker loses its tasks",
        6_000,
        lambda python, n: (
            [[python, "-m", "huey.bin.huey_consumer", "huey_peer.huey", "-w", "4", "-k", "thread", "-q", "-d", "0.001"]]
            * n
        ),
    ),
    _python("saq", "redis", f"{_REDIS}; swept after a timeout; unique keys", 6_000, _each("saq_peer.py")),
    _python("arq", "redis", f"{_REDIS}; run again after a crash; unique keys", 4_000, _each("arq_peer.py")),
    _python("streaq", "redis", f"{_REDIS}; run again after a crash; unique keys", 8_000, _each("streaq_peer.py")),
    _python(
        "procrastinate",
        "postgres",
        "tasks on disk; stalled jobs retried by hand or by a periodic task; unique locks",
        2_500,
        _each("procrastinate_peer.py"),
    ),
    _node("bullmq", "redis", f"{_REDIS}; stalled jobs run again; unique keys", 60_000),
    _node("agenda", "mongo", "tasks on disk; locks time out after 10 minutes; keys not unique", 5_000),
    _node("agenda-channel", "mongo", "as agenda, and told of jobs by a change stream", 5_000, "agenda"),
    _binary(
        "mscheduler",
        "mongo",
        "tasks on disk; leases renewed; unique keys",
        4_000,
        ENVIRONMENT / "rust" / "target" / "release" / "peer",
        "mscheduler-0.3.1",
        "Rust",
    ),
    _binary(
        "river",
        "postgres",
        "tasks on disk; rescued after an hour; unique keys",
        40_000,
        ENVIRONMENT / "go" / "bin" / "river",
        "river-0.51.0",
        "Go",
    ),
    _binary(
        "asynq",
        "redis",
        f"{_REDIS}; leases renewed; unique keys",
        20_000,
        ENVIRONMENT / "go" / "bin" / "asynq",
        "asynq-0.26.0",
        "Go",
    ),
]
INTERPRETER = sys.executable
