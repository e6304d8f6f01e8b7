"""Parts of the site's pages: escaped text, links, tables, and the frame around a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path

from kernelcat.report.printable import printable
from kernelcat.report.sheet import Sheet

_HERE = Path(__file__).parent
_NAVIGATION = (
    ("index.html", "Overview"),
    ("techniques.html", "Techniques"),
    ("numbers.html", "How numbers are made"),
)
_LONG = 48
"""A cell with more characters has several lines."""
_LISTED = 3
"""A page with so many parts begins with a list of them."""


def text(value: object) -> str:
    """``value`` as HTML text or as an attribute in quotes; control characters become visible."""
    return escape(printable(str(value)))


def filename(kind: str, name: str) -> str:
    """The file of a page: ``entry-gemm.html``. Names from foreign databases become safe."""
    safe = re.sub(r"[^a-z0-9_.-]", "-", name)
    if safe != name:
        safe += "-" + sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kind}-{safe}.html"


def link(kind: str, name: str, label: str | None = None) -> str:
    return f'<a href="{text(filename(kind, name))}">{text(label or name)}</a>'


def table(
    name: str,
    caption: str,
    headers: Sequence[str],
    lines: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    total: Sequence[str] = (),
) -> str:
    """A table that can be sorted and filtered, with the state in the page's address.

    Cells of ``lines`` and ``total`` are HTML; ``caption`` and ``headers`` are text. ``name`` stands
    in the address and is unique in a page; ``numbers`` are the columns that hold numbers.
    """
    right = set(numbers)
    heads = "".join(
        f'<th scope="col"{_side(i, right)}><button type="button">{text(header)}</button></th>'
        for i, header in enumerate(headers)
    )
    body = "\n".join(_line(line, right) for line in lines)
    foot = f"<tfoot>{_line(total, right)}</tfoot>" if total else ""
    return (
        f'<div class="table" id="{text(name)}">\n'
        f'<label class="filter">Filter <input type="search" autocomplete="off" '
        f'aria-label="Filter: {text(caption)}"></label> <output></output>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table><caption><span>{text(caption)}</span></caption><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>{body}</tbody>{foot}</table></div></div>\n"
    )


def sheet(name: str, source: Sheet, folded: bool = False) -> str:
    """A table of text cells, with its notes; a ``folded`` one opens by a click or a filter."""
    numbers = range(len(source.headers))[source.numbers]
    lines = ([_cell(cell) for cell in line] for line in source.lines)
    total = [text(cell) for cell in source.total]
    notes = "".join(f"<p>{text(note)}</p>\n" for note in source.notes)
    made = table(name, source.title, source.headers, lines, numbers, total) + notes
    if not folded:
        return made
    count = len(source.lines)
    words = f"{source.title}: table of {count:,} line{'s' * (count != 1)}"
    return f"<details><summary>{text(words)}</summary>\n{made}</details>\n"


def page(title: str, body: str) -> str:
    """A whole page; style and script are in it, so that it loads no other file."""
    links = "".join(f'<a href="{file}">{label}</a>' for file, label in _NAVIGATION)
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = (_HERE / "script.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)} - kernelcat</title>\n<style>{style}</style></head>\n"
        '<body><a class="skip" href="#main">To the content</a>\n'
        f'<nav aria-label="Pages"><b>kernelcat</b>{links}</nav>\n'
        f'<main id="main" tabindex="-1"><h1>{text(title)}</h1>\n{_with_contents(body)}</main>\n'
        f"<script>{script}</script></body></html>\n"
    )


def _with_contents(body: str) -> str:
    """``body`` with an id for each of its parts, and links to them where there are several."""
    pieces = re.split(r"<h2>(.*?)</h2>", body)
    heads, parts = pieces[1::2], pieces[2::2]
    if len(heads) < _LISTED:
        return body
    items = "".join(f'<li><a href="#part-{i}">{re.sub("<.*?>", "", head)}</a></li>'
                    for i, head in enumerate(heads))  # fmt: skip
    listed = f'<nav class="contents" aria-label="On this page"><ul>{items}</ul></nav>\n'
    made = (f'<h2 id="part-{i}">{head}</h2>{part}'
            for i, (head, part) in enumerate(zip(heads, parts, strict=True)))  # fmt: skip
    lead, end, rest = pieces[0].partition("</p>\n")
    return lead + end + listed + rest + "".join(made)


def _cell(words: str) -> str:
    """A cell of text; a long one has several lines."""
    return f'<span class="wide">{text(words)}</span>' if len(words) > _LONG else text(words)


def _line(cells: Sequence[str], numbers: set[int]) -> str:
    rest = "".join(f"<td{_side(i, numbers)}>{cell}</td>" for i, cell in enumerate(cells[1:], 1))
    return f'<tr><th scope="row">{cells[0]}</th>{rest}</tr>'


def _side(column: int, numbers: set[int]) -> str:
    return ' class="n"' if column in numbers else ""
