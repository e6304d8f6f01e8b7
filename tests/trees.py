"""Copies of the catalog with edited files, and the command line of each copy."""

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
    """A replacement of ``before`` by ``after`` in a file of the tree."""

    file: str
    before: str
    after: str


class Tree:
    """A checkout in its own folder, without tuning results."""

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
        """A copy in ``root`` with ``edits``.  Fails where a file lacks the text of an edit."""
        tree = Tree.copy(root, self.root)
        for file, before, after in edits:
            path = root / file
            text = path.read_text()
            assert before in text, f"{file} has no {before!r}"
            path.write_text(text.replace(before, after))
        return tree

    def run(self, *words: str, check: bool = True) -> Any:
        """The JSON that ``kernelcat WORDS --json`` of this tree prints.

        Fails on a nonzero exit status, unless ``check`` is false.
        """
        command = [sys.executable, "-m", "kernelcat", *words, "--json"]
        done = subprocess.run(command, cwd=self.root, env=self._environment(), text=True,
                              capture_output=True, check=False)  # fmt: skip
        assert not check or done.returncode == 0, done.stderr or done.stdout
        return json.loads(done.stdout)

    def digests(self, *entries: str) -> dict[str, str]:
        """Digests of implementations of ``entries`` by name, computed from this tree's sources."""
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
        by_name: dict[str, str] = json.loads(done.stdout)
        return by_name

    def _environment(self) -> dict[str, str]:
        folders = {"KERNELCAT_RECEIPTS": "receipts", "KERNELCAT_MACHINE_CODE": "machine_code"}
        return {**os.environ, **{name: str(self.root / "own" / f) for name, f in folders.items()}}
