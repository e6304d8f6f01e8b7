"""Copies of the catalog with something changed, and what its own command line says of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kernelcat import paths

ROOT = paths.data("kernels").parent
PARTS = ("kernelcat", "kernels", "reference")


class Edit(NamedTuple):
    """Text in a file of the tree, and what stands there instead."""

    file: str
    before: str
    after: str


class Tree:
    """A checkout of its own, without results."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def copy(root: Path, original: Path = ROOT) -> Tree:
        parts = [*PARTS, *(p for p in ("tuning_db",) if original != ROOT)]
        for part in parts:
            shutil.copytree(original / part, root / part, ignore=shutil.ignore_patterns("*.pyc"))
        (root / "tuning_db").mkdir(exist_ok=True)
        return Tree(root)

    def changed(self, root: Path, edits: Iterable[Edit]) -> Tree:
        """A copy with ``edits``, each of which must find its text."""
        tree = Tree.copy(root, self.root)
        for file, before, after in edits:
            path = root / file
            text = path.read_text()
            assert before in text, f"{file} has no {before!r}"
            path.write_text(text.replace(before, after))
        return tree

    def run(self, *words: str, check: bool = True) -> Any:
        """What ``kernelcat WORDS --json`` of this tree says; it may fail where not ``check``."""
        command = [sys.executable, "-m", "kernelcat", *words, "--json"]
        done = subprocess.run(command, cwd=self.root, env=self._environment(), text=True,
                              capture_output=True, check=False)  # fmt: skip
        assert not check or done.returncode == 0, done.stderr or done.stdout
        return json.loads(done.stdout)

    def digests(self, *entries: str) -> dict[str, str]:
        """The digests of some entries' implementations, computed anew."""
        code = (
            "import json, sys\nfrom kernelcat import catalog\n"
            "from kernelcat.catalog import digest\n"
            "print(json.dumps({i.name: digest.compute(i) for e in sys.argv[1:]"
            " for i in catalog.implementations(e)}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *entries], cwd=self.root, env=self._environment(),
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def _environment(self) -> dict[str, str]:
        own = {"KERNELCAT_RECEIPTS": "receipts", "KERNELCAT_MACHINE_CODE": "machine_code"}
        return {**os.environ, **{name: str(self.root / "own" / f) for name, f in own.items()}}
