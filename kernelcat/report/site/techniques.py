"""The page of techniques: a table of all, then what each is, with its evidence."""

from __future__ import annotations

from functools import cache

from kernelcat import catalog
from kernelcat.errors import MissingDependency
from kernelcat.report.site.markup import link, page, table, text
from kernelcat.report.techniques.evidence import plain
from kernelcat.report.techniques.index import GROUPS
from kernelcat.report.techniques.technique import Group, Technique, tally

FILE = "techniques.html"
_LEAD = (
    "Techniques of GPU performance work: where the catalog uses each of them, and how we know. "
    "What was measured, found in machine code that ran, or is held by a test counts as covered."
)
_PLACES = 3
"""Places that a line of the table names; of more it gives the number."""


@cache
def techniques_page() -> str:
    """The page; where a language is not installed, how to install it."""
    try:
        body = _table() + "".join(map(_group, GROUPS))
    except MissingDependency as missing:
        body = f"<p>{text(missing)}</p>\n"
    return page("Techniques", f'<p class="lead">{_LEAD}</p>\n{body}')


def _table() -> str:
    every = [(each, group) for group in GROUPS for each in group.techniques]
    counts = tally([each for each, _ in every]).items()
    total = ", ".join(f"{count} {state}" for state, count in counts if count)
    lines = [
        (f'<a href="#{_id(each)}">{text(each.name)}</a>', text(each.state), text(group.name),
         f'<span class="wide">{_where(each, _PLACES)}</span>')
        for each, group in every
    ]  # fmt: skip
    headers = ("technique", "state", "group", "where")
    return f"<p>{len(every)}: {text(total)}.</p>\n" + table("index", "Techniques", headers, lines)


def _group(group: Group) -> str:
    return f"<h2>{text(group.name)}</h2>\n" + "".join(map(_technique, group.techniques))


def _technique(each: Technique) -> str:
    also = f" Also: {', '.join(each.aliases)}." if each.aliases else ""
    evidence = "".join(f"<li>{_plain(found.text(plain))}</li>\n" for found in each.evidence)
    rest = "".join(
        f"<p>{title}: {_plain(words)}</p>\n"
        for title, words in (("Not yet", each.not_yet), ("Does not apply", each.does_not_apply))
        if words
    )
    places = _where(each)
    return (
        f'<details id="{_id(each)}"><summary>{text(each.name)} ({text(each.state)})</summary>\n'
        f'<p class="lead">{_plain(each.explanation + also)}</p>\n'
        + (f"<ul>\n{evidence}</ul>\n" if evidence else "")
        + rest
        + (f"<p>Where: {places}.</p>\n" if places else "")
        + f"<p>Source: {_plain(each.source)}.</p></details>\n"
    )


def _where(each: Technique, most: int | None = None) -> str:
    """Pages of the entries whose implementations use it, and files; of more than ``most`` the
    number."""
    names = set(catalog.names())
    places = [
        link("entry", name.split("/")[0], name) if name.split("/")[0] in names else text(name)
        for name in each.implementations
    ]
    places += [f"<code>{text(path)}</code>" for path in each.modules]
    more = 0 if most is None else max(len(places) - most, 0)
    return ", ".join(places[:most]) + (f" and {more} more" if more else "")


def _plain(words: str) -> str:
    """A line of Markdown as HTML text, without its marks of code."""
    return text(words.replace("`", ""))


def _id(each: Technique) -> str:
    return f"technique-{each.slug}"
