"""No file, and no package, needs one that needs it in turn, even for its types: each can be read after what it uses."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Which modules each module needs."""
    modules = _modules()
    needed = {name: _imported(path, modules) - {name} for name, path in modules.items()}
    assert sum(map(len, needed.values())) > 500, "the imports were not read"
    return needed


def _assert_ordered(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these import one another: {' -> '.join(error.args[1])}") from None


def test_no_files_need_each_other(graph: dict[str, set[str]]) -> None:
    _assert_ordered(graph)


_PACKAGES = sorted(name for name, path in _modules().items() if path.name == "__init__.py")


def _place(module: str, inside: str) -> str | None:
    """Return the package or file directly in `inside` that a module belongs to. None: it is elsewhere."""
    name = module.removeprefix(inside + ".")
    return None if name == module else name.partition(".")[0]


@pytest.mark.parametrize("inside", _PACKAGES)
def test_nothing_in_a_package_needs_what_needs_it(graph: dict[str, set[str]], inside: str) -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for module, needed in graph.items():
        if (place := _place(module, inside)) is not None:
            places[place] |= {of for each in needed if (of := _place(each, inside)) is not None} - {place}
    assert places, "nothing was found in the package"
    _assert_ordered(places)
