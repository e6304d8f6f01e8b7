"""What README.md and docs/ show works: commands, Python examples and links."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

import kernelcat
from kernelcat import catalog
from kernelcat.call import signature
from kernelcat.cli import main
from kernelcat.store import Store, shipped

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES if page.parent.name not in ("entries", "results")
          and page.name != "add-an-entry.md"]  # fmt: skip
"""Pages with commands and examples; tests/test_add_an_entry.py follows add-an-entry.md."""

NOT_RUN = {
    r"tune ": "compiles for minutes",
    r"bench ": "needs a GPU",
    r"regret ": "needs a GPU",
    r"lock ": "needs a workload that a program has written; tests/test_lock.py runs it",
    r"build ": "compiles for minutes; tests/test_bundle.py runs it",
    r"ladder .*--measure": "needs a GPU",
    r"profile ": "needs a GPU",
    r"fuzz ": "runs for minutes",
    r"check ": "turns the interpreter on for its process; tests/test_check.py runs it",
    r"inspect ": "compiles for half a minute",
    r"moe generate smollm2 ": "needs a network",
    r"moe generate FOLDER ": "needs a checkpoint",
    r"moe serve ": "needs 14 GB, and runs until it is stopped",
    r"moe bench ": "needs 14 GB",
    r"moe ladder gpt-oss": "needs 50 GB",
    r"calibrate --all ": "runs for minutes; tests/test_calibration.py runs it for one entry",
    r"db merge colleague": "needs somebody else's database",
    r"db misses ": "needs a workload that a program has written",
}
"""Beginning of a command -> why it is parsed only."""


class Block(NamedTuple):
    """A fenced or indented block of code."""

    language: str
    word: str
    """What a block of Python needs: nothing (empty), ``gpu``, or arrays (``fragment``)."""
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fenced = re.compile(r"^```(\S*)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
    found = [Block(*(part or "" for part in parts)) for parts in fenced.findall(text)]
    indented = re.findall(r"(?:(?<=\n\n)|\A)(?:    .+\n)+", fenced.sub("", text))
    return found + [Block("", "", block) for block in indented]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's blocks, comments left out."""
    for block in blocks(page):
        if block.language in ("", "sh"):
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] in ("kernelcat", "make", "pip", "python"):
                    yield words


def why_not_run(words: list[str]) -> str | None:
    line = " ".join(words) + " "
    return next((why for start, why in NOT_RUN.items() if re.match(start, line)), None)


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words begin with, and the rest of the words."""
    command: click.Command = main
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {' '.join(words)}"
        command, words = found, words[1:]
    return command, words


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and cache, and a database as a tune leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNELCAT_CACHE", str(tmp_path / "cache"))
    with Store.open() as store:
        store.add([row for row in shipped() if row.entry == "kv_write"])


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("measured")
def test_commands_run(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    for program, *words in commands(page):
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.M), words
        elif program == "pip":
            (named,) = re.findall(r"^kernelcat\[(.*)\]$", words[-1])
            assert set(named.split(",")) <= extras["optional-dependencies"].keys()
        elif program == "python":  # tests/test_examples.py runs them
            assert (ROOT / words[0]).is_file()
        elif why_not_run(words):
            command, rest = find(words)
            command.make_context(words[0], rest)  # raises for an unknown option or a bad value
        else:
            done = CliRunner().invoke(main, words)
            assert done.exit_code == 0, f"{words}: {done.output}"


def test_every_reason_not_to_run_is_in_use() -> None:
    shown = [" ".join(words) + " " for page in GUIDES for _, *words in commands(page)]
    assert all(any(re.match(start, line) for line in shown) for start in NOT_RUN)


def spans(page: Path) -> list[str]:
    """Commands in running text, such as the ones below tables."""
    return re.findall(
        r"`kernelcat ([a-z][^`]*)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_commands_in_running_text_exist_with_their_options(page: Path) -> None:
    for line in spans(page):
        command, rest = find(shlex.split(line))
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= known, line


EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in GUIDES
    for number, block in enumerate(b for b in blocks(page) if b.language == "python")
]


def printed(text: str) -> list[str]:
    """What an example says that it prints: the comments behind ``print``."""
    return re.findall(r"^print\(.*\)  # (.+)$", text, re.M)


@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_compiles_names_what_exists_and_runs_where_it_needs_no_gpu(
    block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile(block.text, "example", "exec")
    owners: dict[str, Any] = {"kernelcat": kernelcat, "mla": kernelcat.mla}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = owners.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), node.attr
    assert block.word in ("", "gpu", "fragment")
    if not block.word:
        exec(code, {})
        lines = capsys.readouterr().out.splitlines()
        assert all(line in lines for line in printed(block.text))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [e for e in EXAMPLES if e.values[0].word == "gpu"])
def test_an_example_runs_on_a_gpu(block: Block) -> None:
    exec(compile(block.text, "example", "exec"), {})


@pytest.mark.parametrize("name", catalog.names())
def test_the_call_on_an_entry_page_has_the_arguments_of_the_entry(name: str) -> None:
    (block,) = [b for b in blocks(ROOT / "docs" / "entries" / f"{name}.md") if b.language]
    entry, call = catalog.entry(name), None
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "op":
            call = node
    assert call is not None
    named = {k.arg: k.value for k in call.keywords if k.arg != "out"}
    arrays, axes = signature.arrange(entry, [ast.unparse(a) for a in call.args], named)
    assert all(array is not None for array in arrays)
    assert [ast.unparse(a) for a in call.args] == [t.name for t in entry.inputs if t.flag is None]
    for axis, value in axes.items():
        entry.axis(axis).check(ast.literal_eval(value))
    outs = [k.value for k in call.keywords if k.arg == "out"]
    required = [tensor for tensor in entry.updated if tensor.flag is None]
    assert bool(outs) == bool(required)


def prose(page: Path) -> str:
    """The page without code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("[", "").replace("(", ""), text)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not link.startswith(("https://", "http://"))]


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: f"{page.parent.name}/{page.stem}"
)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            targets = ((page.parent / link.partition("#")[0]).resolve() for link in links(page))
            waiting += [target for target in targets if target.is_file()]
    assert set(PAGES) <= reached


def test_pages_render_as_a_site_without_a_warning(tmp_path: Path) -> None:
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    words = shlex.split(line.replace("$(BIN)/python", sys.executable))
    assert words[-1] == "build/docs" and "--fail-on-warning" in words
    words[-1] = str(tmp_path / "site")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        made = tmp_path / "site" / page.relative_to(ROOT / "docs").with_suffix(".html")
        assert "<h1>" in made.read_text(), page


def test_a_link_that_leads_nowhere_fails_the_site(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-b", "html",
             str(folder), str(tmp_path / "site")]  # fmt: skip
    for link, code in (("#kernels", 0), ("#nothing", 1), ("missing.md", 1)):
        (folder / "index.md").write_text(f"# kernels\n\n[A link]({link})\n")
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr


def test_every_environment_variable_is_in_the_table() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text()
    sources = (path.read_text() for path in (ROOT / "kernelcat").rglob("*.py"))
    used = {name for source in sources for name in re.findall(r"KERNELCAT_[A-Z_]+", source)}
    internal = {"KERNELCAT_COMPLETE", "KERNELCAT_NAME"}  # a shell's, and a pattern of names
    table = text.partition("## Environment variables")[2]
    assert {name for name in used - internal if f"`{name}`" not in table} == set()


def test_the_table_of_versions_is_that_of_the_package_and_of_the_results() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "docs" / "getting-started.md").read_text().partition("## Versions")[2]
    needed = " ".join(project["dependencies"]
                      + [line for extra in ("triton", "cute", "torch")
                         for line in project["optional-dependencies"][extra]])  # fmt: skip
    for package, words in (("nvidia-cuda-nvrtc", "13.0"), ("triton", "3.6"), ("torch", "2.11"),
                           (r"nvidia-cutlass-dsl\[cu13\]", "4.8")):  # fmt: skip
        assert re.search(rf"{package}>={words}", needed) and f"| {words} or newer" in table
    assert project["requires-python"] == ">=3.11" and "| 3.11 or newer" in table
    environments = [row.environment for row in shipped()]
    drivers = {environment["driver"] for environment in environments}
    assert all(driver in table for driver in drivers)
    for compiler in ("nvrtc", "triton"):
        assert all(e["compilers"][compiler] in table for e in environments)
