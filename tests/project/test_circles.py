"""No file of the package needs, even for its types, a file that needs it in turn: each can be read after what it uses."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import taskmesh

_PACKAGE = Path(taskmesh.__file__).parent


def _modules() -> dict[str, Path]:
    modules = {}
    for path in _PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path
    return modules


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that `path` names in an import anywhere: at its top, in a function, or for its types alone."""
    named = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                named |= {inner} if inner in modules else {node.module} & modules.keys()
    return named


def test_no_files_need_each_other() -> None:
    modules = _modules()
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        graph[name] = _imported(path, modules) - {name}
    assert sum(map(len, graph.values())) > 500, "the imports were not read"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import one another: {' -> '.join(error.args[1])}") from None
