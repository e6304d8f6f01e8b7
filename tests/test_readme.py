"""README.md shows the committed results and receipts."""

from __future__ import annotations

from pathlib import Path

from kernelcat.report import support
from kernelcat.report.readme import render_readme
from kernelcat.store import shipped

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_is_what_make_readme_writes() -> None:
    text = README.read_text(encoding="utf-8")
    fresh = support.fill(render_readme(text, shipped()))
    assert fresh == text, "run make readme"


def test_the_test_command_is_in_the_readme() -> None:
    assert "make test" in README.read_text() and "make demo" in README.read_text()
