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
from kernelcat.jit import cuda

_IMPORT = re.compile(r"^from kernelcat\.kernels\.(?P<path>[\w.]+) import", re.MULTILINE)


def digest(implementation: Implementation) -> str:
    """16 hex digits over every file that decides what this implementation computes and how fast."""
    return digest_of(implementation.language, implementation.entry)


def files(language: str, entry: str) -> list[Path]:
    """The kernel's own files and, transitively, those they include or import from the catalog."""
    root = paths.data("kernels")
    folder = root / language / entry
    pending = list(folder.iterdir()) if folder.is_dir() else [root / language / f"{entry}.py"]
    found = set[Path]()
    while pending:
        path = pending.pop()
        if path in found or path.suffix not in (".py", ".cu", ".cuh") or not path.is_file():
            continue
        found.add(path)
        pending += _imported(path, root) if path.suffix == ".py" else cuda.files(path)
    return sorted(found)


def _imported(path: Path, root: Path) -> list[Path]:
    modules = [root.joinpath(*m["path"].split(".")) for m in _IMPORT.finditer(path.read_text())]
    return [file for m in modules for file in (m.with_suffix(".py"), m / "__init__.py")]


@cache
def digest_of(language: str, entry: str) -> str:
    """The same for an entry in one language; imports no compiler."""
    root = paths.data("kernels")
    total = hashlib.sha256()
    for path in files(language, entry):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()[:16]
