"""Kinds of evidence for a technique. Each kind knows how to verify and how to show itself.

Nothing here is typed in by hand except names: times, ratios and counts come from the files in
``tuning_db/`` when the evidence is shown. :mod:`kernelcat.report.techniques.code` has the evidence
in machine code, :mod:`kernelcat.report.techniques.measured` the evidence in measurements.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernelcat import paths

MEASURED, PROVEN, TESTED, COMPILED = "measured", "in machine code", "tested", "compiled only"
LEVELS = (MEASURED, PROVEN, TESTED, COMPILED)
"""What evidence can show, strongest first. ``compiled only``: no committed record says that the
machine code ran."""

GPU = "h200"
"""The SKU of the committed measurements and machine-code records."""

Link = Callable[[str, str], str]
"""Makes text of a label and a path that is relative to the root of the repository."""


class Evidence(ABC):
    """One reason to believe that the catalog uses a technique."""

    @property
    @abstractmethod
    def level(self) -> str:
        """One of :data:`LEVELS`."""

    @abstractmethod
    def faults(self) -> list[str]:
        """Why the evidence does not hold; empty where it holds."""

    @abstractmethod
    def text(self, link: Link) -> str:
        """One line of Markdown."""

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names of the implementations that this is about (``gemm/cuda/wgmma``)."""
        return ()

    def data(self) -> dict[str, Any]:
        """The evidence as JSON data."""
        return {"kind": type(self).__name__.lower(), "level": self.level, "text": self.text(plain)}


def plain(label: str, path: str) -> str:
    """A link for a terminal and for JSON: the label alone."""
    return label


def root() -> Path:
    """The root of the repository; of an installed package, the folder of its data."""
    return paths.data("kernels").parent


@dataclass(frozen=True)
class Test(Evidence):
    """A test that fails where the technique is lost or wrong.

    Attributes
    ----------
    node : ``tests/test_x.py::test_y``, without parameters
    """

    __test__ = False  # pytest would collect a class of this name
    node: str

    @property
    def level(self) -> str:
        return TESTED

    @property
    def path(self) -> str:
        return self.node.partition("::")[0]

    def faults(self) -> list[str]:
        if not (root() / self.path).is_file():
            return [f"there is no file {self.path}"]
        name = self.node.partition("::")[2]
        return [] if name in _tests(self.path) else [f"{self.path} has no test {name}"]

    def text(self, link: Link) -> str:
        name = self.node.partition("::")[2]
        needs = ", which needs a GPU" if "mark.gpu" in _tests(self.path).get(name, "") else ""
        return f"the test {link(f'`{Path(self.path).stem}::{name}`', self.path)}{needs}"


@cache
def _tests(path: str) -> dict[str, str]:
    """Test of a file -> source of its marks and decorators; empty without the file."""
    file = root() / path
    if not file.is_file():
        return {}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_file = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    marks = [line for line in of_file if line.startswith("pytestmark")]
    functions = (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    tests = [node for node in functions if node.name.startswith("test_")]
    return {n.name: " ".join((*marks, *map(ast.unparse, n.decorator_list))) for n in tests}
