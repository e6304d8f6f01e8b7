"""The index of techniques for a terminal and as JSON data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from kernelcat.report.sheet import Sheet
from kernelcat.report.techniques.evidence import plain
from kernelcat.report.techniques.technique import Group, Technique, tally

_WIDTH = 96
_PLACES = 2
"""Places that a line of the table names."""


def sheet(groups: Sequence[Group]) -> Sheet:
    """A table with one line for each technique of ``groups``."""
    every = [each for group in groups for each in group.techniques]
    counts = ", ".join(f"{count} {state}" for state, count in tally(every).items() if count)
    return Sheet(
        title="Techniques",
        headers=("technique", "group", "state", "where"),
        lines=[
            (each.name, group.name, each.state, _where(each))
            for group in groups
            for each in group.techniques
        ],
        notes=[f"{len(every)}: {counts}.", "kernelcat techniques NAME explains one."],
        numbers=slice(0, 0),
    )


def _where(technique: Technique) -> str:
    places = technique.where
    more = len(places) - _PLACES
    return ", ".join(places[:_PLACES]) + (f" and {more} more" if more > 0 else "")


def detail(technique: Technique, group: Group) -> str:
    """Everything about one technique."""
    also = f" (also: {', '.join(technique.aliases)})" if technique.aliases else ""
    lines = [f"{technique.name}{also}", f"{group.name}; {technique.state}", ""]
    lines += textwrap.wrap(technique.explanation, _WIDTH)
    lines += ["", "evidence"] if technique.evidence else []
    for each in technique.evidence:
        text = each.text(plain).replace("`", "")
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    for title, text in (
        ("not yet", technique.not_yet),
        ("does not apply", technique.does_not_apply),
        ("where", ", ".join(technique.where)),
        ("source", technique.source),
    ):
        if text:
            lines += ["", *textwrap.wrap(f"{title}: {text}", _WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def data(technique: Technique, group: Group) -> dict[str, Any]:
    """One technique as JSON data."""
    return {
        "name": technique.name,
        "aliases": technique.aliases,
        "group": group.name,
        "state": technique.state,
        "where": technique.where,
        "explanation": technique.explanation,
        "evidence": [each.data() for each in technique.evidence],
        "not_yet": technique.not_yet,
        "does_not_apply": technique.does_not_apply,
        "source": technique.source,
    }
