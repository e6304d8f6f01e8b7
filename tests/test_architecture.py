"""The rooms of the package import what docs/architecture.md says, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kernelcat"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"kernels", "reference"}
"""Subpackages with code; ``kernels`` and ``reference`` only point to the catalog's folders."""

EXCEPTION = ("verify", "tune")
"""The one import of a room from a line above."""

PAGE = (ROOT / "docs" / "architecture.md").read_text()
_ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \|$", re.MULTILINE)


def documented() -> dict[str, set[str]]:
    """Room -> rooms that the page allows it to import."""
    rows = _ROW.findall(PAGE)
    return {room: set(re.findall(r"`(\w+)`", allowed)) for room, allowed in rows}


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from run_time_nodes(node)


def imported(source: str) -> set[str]:
    """Rooms that a module imports, also within functions."""
    names: set[str] = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "kernelcat":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= _rooms(node.module or "")
        elif isinstance(node, ast.Import):
            names |= _rooms(*(alias.name for alias in node.names))
    return names & ROOMS


def _rooms(*modules: str) -> set[str]:
    """The second part of the names of modules that are in the package."""
    return {name.split(".")[1] for name in modules if name.startswith("kernelcat.")}


def test_the_page_has_every_room() -> None:
    assert documented().keys() == ROOMS


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_what_the_page_says(room: str) -> None:
    files = [path for path in (PACKAGE / room).rglob("*.py") if "skeleton" not in path.parts]
    used = set().union(*(imported(path.read_text()) for path in files)) - {room}
    assert used == documented()[room]


def test_rooms_import_from_their_own_line_of_the_plan_or_from_below() -> None:
    plan = re.search(r"(?:^    .+\n)+", PAGE, re.MULTILINE)
    assert plan
    lines = [set(re.findall(r"\w+", line)) & ROOMS for line in plan[0].splitlines()]
    level = {room: -number for number, line in enumerate(lines) for room in line}
    assert level.keys() == ROOMS
    upwards = {
        (room, other)
        for room, allowed in documented().items()
        for other in allowed
        if level[other] > level[room]
    }
    assert upwards == {EXCEPTION}


def test_imports_for_types_alone_do_not_count() -> None:
    source = (
        "from kernelcat.jit import build\nif TYPE_CHECKING:\n    import kernelcat.tune\n"
        "def late():\n    from kernelcat import store\n"
    )
    assert imported(source) == {"jit", "store"}
