"""docs/add-an-entry.md, followed from the first line to the last in a tree without `attn_merge`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from trees import ROOT, Tree

from kernelcat.cli import main

NAME = "attn_merge"
PAGE = ROOT / "docs" / "add-an-entry.md"
MARK = "    work_in_progress=True,\n"
SHELL = "sh"


class Block(NamedTuple):
    """A fenced block of the page: ``LANGUAGE WORD`` and its text."""

    language: str
    word: str
    """The file that a quotation is from; of commands: empty, or why they do not run here."""
    text: str


def blocks() -> list[Block]:
    found = re.findall(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [Block(*parts) for parts in found]


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.splitlines():
        yield [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line)]


def kernelcat(tree: Tree, *words: str) -> str:
    command = [sys.executable, "-m", "kernelcat", *words]
    done = subprocess.run(command, cwd=tree.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A checkout in which nobody has written ``attn_merge`` yet."""
    copied = Tree.copy(tmp_path / "tree")
    shutil.copy(ROOT / "pyproject.toml", copied.root)
    (copied.root / "reference" / f"{NAME}.py").unlink()
    for language in ("cuda", "triton", "cute"):
        shutil.rmtree(copied.root / "kernels" / language / NAME)
    return copied


def finish(tree: Tree, file: str) -> None:
    """Replace what the skeleton wrote by what the repository has."""
    path = Path(file)
    if path.parts[0] == "reference":
        text = (ROOT / path).read_text()
        named = f'    name="{NAME}",\n'
        assert named in text
        (tree.root / path).write_text(text.replace(named, named + MARK))
    else:
        shutil.rmtree(tree.root / path.parent)
        shutil.copytree(ROOT / path.parent, tree.root / path.parent)


@pytest.mark.slow
def test_the_page_leads_to_the_entry(tree: Tree) -> None:
    finished = set()
    for block in blocks():
        if block.language == SHELL:
            for program, *words in commands(block) if not block.word else ():
                assert program == "kernelcat"
                if words == ["receipts", "digests"]:  # the page: delete the mark
                    specification = tree.root / "reference" / f"{NAME}.py"
                    specification.write_text(specification.read_text().replace(MARK, ""))
                kernelcat(tree, *words)
        elif Path(block.word).parent not in finished:
            finished.add(Path(block.word).parent)
            finish(tree, block.word)
    (listed,) = (row for row in tree.run("list") if row["entry"] == NAME)
    assert not listed["work_in_progress"] and len(listed["languages"]) == 3
    for folder in ("reference", "kernels"):
        for path in (ROOT / folder).rglob(f"*{NAME}*/*"):
            if path.is_file() and path.suffix != ".pyc":
                assert (tree.root / path.relative_to(ROOT)).read_text() == path.read_text()


@pytest.mark.parametrize(
    "block", [b for b in blocks() if b.language != SHELL], ids=lambda b: b.word
)
def test_what_the_page_quotes_stands_in_the_file(block: Block) -> None:
    assert block.text in (ROOT / block.word).read_text()


@pytest.mark.parametrize(
    "words", [words for b in blocks() if b.language == SHELL and b.word for words in commands(b)],
    ids=" ".join,
)  # fmt: skip
def test_commands_that_do_not_run_here_exist_with_their_options(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    command: click.Command | None = main
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), rest.pop(0))
    assert command is not None, words
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("-")} <= known
