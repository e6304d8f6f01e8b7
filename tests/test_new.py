"""`kernelcat new`: the skeleton passes the checks and tests that cover every entry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trees import ROOT, Tree

from kernelcat.catalog.implementation import LANGUAGES
from kernelcat.catalog.skeleton import FILES

NAME = "vector_sum"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    copied = Tree.copy(tmp_path / "tree")
    shutil.copy(ROOT / "pyproject.toml", copied.root)
    shutil.copytree(ROOT / "tests", copied.root / "tests")
    return copied


def new(tree: Tree, *languages: str, name: str = NAME) -> list[str]:
    options = [word for language in languages for word in ("--language", language)]
    return tree.run("new", name, *options)["files"]


def passes(tree: Tree, *files: str, keyword: str = NAME) -> bool:
    """Whether the tests of ``files`` that match ``keyword`` pass in this tree."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", keyword]
    done = subprocess.run([*command, *(f"tests/{file}" for file in files)], cwd=tree.root,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr  # status 5: no test matched
    return done.returncode == 0


@pytest.mark.slow
def test_a_new_entry_works_in_every_language(tree: Tree) -> None:
    written = new(tree, *LANGUAGES)
    assert len(written) == sum(map(len, FILES.values()))
    listed = {row["entry"]: row for row in tree.run("list")}
    assert listed[NAME]["work_in_progress"] and listed[NAME]["languages"] == list(LANGUAGES)
    (outcome,) = tree.run("check", NAME)  # in the interpreter
    assert not outcome["failures"] and outcome["fuzz_examples"] == 10
    assert len(tree.run("inspect", NAME)) == len(LANGUAGES)
    assert passes(tree, "test_spec.py", "test_compiles.py", "test_fuzz.py", "test_catalog.py")
    for tool in (["check"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *tool, *written[:1]], cwd=tree.root, check=True
        )


@pytest.mark.slow
def test_one_language_suffices_while_the_entry_is_work_in_progress(tree: Tree) -> None:
    new(tree)
    assert passes(tree, "test_catalog.py", "test_spec.py", keyword=f"{NAME} or complete")
    specification = tree.root / "reference" / f"{NAME}.py"
    work_in_progress = specification.read_text()
    specification.write_text(work_in_progress.replace("    work_in_progress=True,\n", ""))
    assert specification.read_text() != work_in_progress
    assert not passes(tree, "test_catalog.py")


def test_adding_a_language_overwrites_nothing(tree: Tree) -> None:
    new(tree, "triton")
    specification = tree.root / "reference" / f"{NAME}.py"
    specification.write_text(specification.read_text().replace("out = x + y", "changed"))
    assert new(tree, "cuda") == [file.format(name=NAME) for file in FILES["cuda"]]
    assert "changed" in specification.read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [("Vector-Sum", "lower-case words joined by _"), ("gemm", "exists already")],
)
def test_a_bad_name_is_refused(name: str, message: str) -> None:
    command = [sys.executable, "-m", "kernelcat", "new", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and message in done.stderr
