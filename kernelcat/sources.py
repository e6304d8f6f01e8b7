"""Which files an implementation is made of, and their digest.

A measurement or a receipt is *stale* when this digest differs from the one it carries.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

from kernelcat import paths
from kernelcat.implementation import Implementation

_INCLUDE = re.compile(r'^\s*#include "(?P<path>[^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^from kernelcat\.kernels\.(?P<path>[\w.]+) import", re.MULTILINE)
_SUFFIXES = (".py", ".cu", ".cuh")


def digest(implementation: Implementation) -> str:
    """16 hex digits over every file that decides what this implementation computes and how fast."""
    return _digest(implementation.language, implementation.entry)


def files(language: str, entry: str) -> list[Path]:
    """The kernel's own files and, transitively, those they include or import from the catalog."""
    root = paths.data("kernels")
    folder = root / language / entry
    start = list(folder.iterdir()) if folder.is_dir() else [root / language / f"{entry}.py"]
    pending, found = [p for p in start if p.suffix in _SUFFIXES], set[Path]()
    while pending:
        path = pending.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        pending += _needed(path, path.read_text(), root)
    return sorted(found)


def _needed(path: Path, text: str, root: Path) -> list[Path]:
    include = root / "cuda" / "include"
    needed = [base / m["path"] for m in _INCLUDE.finditer(text) for base in (include, path.parent)]
    for match in _IMPORT.finditer(text):
        module = root.joinpath(*match["path"].split("."))
        needed += [module.with_suffix(".py"), module / "__init__.py"]
    return needed


@cache
def _digest(language: str, entry: str) -> str:
    root = paths.data("kernels")
    total = hashlib.sha256()
    for path in files(language, entry):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
