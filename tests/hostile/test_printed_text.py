"""Text of foreign databases on the terminal, in Markdown and in HTML: shown, never obeyed."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kernelcat.cli import main
from kernelcat.report.board import board
from kernelcat.report.page import to_html
from kernelcat.report.printable import printable
from kernelcat.report.render import table, to_markdown
from kernelcat.store import Measurement

ROW: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("measurement.json").read_text())
NAMES = ["[red]a[/red]", "[link=https://x.org]x", "a[/]b", ":smile:", "<b>bold</b>", "a|b", "`a`"]
ESCAPES = ["\x1b[31mred", "\x1b]0;title\x07", "a\rb", "\x9b2J", "a\u202eb", "a\x08b", "\udcffb"]


@pytest.mark.parametrize("text", ESCAPES)
def test_escapes_become_visible(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert "\\" in shown
    assert printable("plain \u00b5s \u2248 text\n\tand a second line") == (
        "plain \u00b5s \u2248 text\n\tand a second line"
    )


def rows(title: str) -> list[Any]:
    row = Measurement.from_json(ROW | {"problem_name": "x"})
    (shown,) = board([row], gpu="h200", entry="gemm", is_current=lambda row: True)
    return [replace(shown, problem_name=title)]


@pytest.mark.parametrize("name", [*NAMES, *ESCAPES])
def test_a_name_is_shown_in_the_terminal_as_it_is(name: str) -> None:
    out = io.StringIO()
    Console(file=out, width=200, force_terminal=True, color_system="truecolor").print(
        table(rows(name))
    )
    assert printable(name) in out.getvalue().replace("\x1b[0m", "").replace("\x1b[2m", "")
    assert name in NAMES or name not in out.getvalue()


@pytest.mark.parametrize("name", [*NAMES, *ESCAPES])
def test_a_name_is_text_in_html_and_markdown(name: str) -> None:
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(to_html(rows(name)))
    assert "b" not in tags
    assert "<b>" not in to_markdown(rows(name))
    lines = to_markdown(rows(name)).splitlines()
    cells = [line.replace("\\|", "").count("|") for line in lines if line.startswith("|")]
    assert len(set(cells)) == 1


def test_an_error_shows_the_escapes_in_a_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["db", "import", str(tmp_path / "a\x1b[31mb.jsonl")])
    assert result.exit_code == 1
    assert "\\x1b[31mb.jsonl" in result.output
    assert "\x1b" not in result.output


def test_no_verb_prints_around_the_filter() -> None:
    """Verbs print by `kernelcat.cli.output`, which filters; JSON is ASCII by itself."""
    folder = Path(sys.modules["kernelcat.cli"].__file__ or "").parent
    for path in sorted(folder.glob("*.py")):
        if path.name != "output.py":
            assert "click.echo(" not in path.read_text(), path.name
