"""All techniques, and the look-up of one by its name."""

from __future__ import annotations

import re
from difflib import get_close_matches

from kernelcat.errors import UnknownName, nearest
from kernelcat.report.techniques.groups import (
    adaptive,
    attention,
    blackwell,
    compilation,
    concurrency,
    distributed,
    experts,
    foundations,
    graphs,
    memory,
    occupancy,
    paging,
    pipelining,
    precision,
    products,
    search,
    serving,
    threads,
    tiling,
)
from kernelcat.report.techniques.technique import Group, Technique

_MODULES = (
    foundations,
    threads,
    memory,
    occupancy,
    tiling,
    products,
    pipelining,
    concurrency,
    graphs,
    precision,
    compilation,
    experts,
    paging,
    attention,
    serving,
    adaptive,
    search,
    blackwell,
    distributed,
)

GROUPS: tuple[Group, ...] = tuple(module.GROUP for module in _MODULES)
"""In the order in which people learn them."""

_HINTS = 5
"""Names that a message about an unknown name lists at most."""


def every() -> tuple[Technique, ...]:
    """All techniques, in the order of the groups."""
    return tuple(each for group in GROUPS for each in group.techniques)


def find(name: str) -> tuple[Technique, Group]:
    """The technique with this name, alias or abbreviation, and its group.

    Case, punctuation, and hyphens in place of spaces do not matter (``tma-multicast``).

    Raises
    ------
    UnknownName
        There is no such technique; the message lists the nearest names.
    """
    known: dict[str, tuple[Technique, Group]] = {}
    for called in (_full_names, _parts):
        for group in GROUPS:
            for each in group.techniques:
                for text in called(each):
                    known.setdefault(_key(text), (each, group))
    if _key(name) not in known:
        raise UnknownName(f"unknown technique {name!r}{_hint(_key(name), list(known))}")
    return known[_key(name)]


def find_group(name: str) -> Group:
    """The group with this name, written as for :func:`find`; raises ``UnknownName``."""
    known = {_key(group.name): group for group in GROUPS}
    if _key(name) not in known:
        raise UnknownName(f"unknown group {name!r}{_hint(_key(name), list(known))}")
    return known[_key(name)]


def _full_names(technique: Technique) -> list[str]:
    return [technique.name, *technique.aliases]


def _parts(technique: Technique) -> list[str]:
    """Both parts of names such as ``PDL (Programmatic Dependent Launch)`` and ``GQA/MQA``."""
    parts = (re.split(r" \(|\)|/|, ", name) for name in _full_names(technique))
    return [part for names in parts for part in names if part]


def _key(name: str) -> str:
    """The words of ``name`` in lower case, joined by hyphens, without *and*."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word != "and")


def _hint(name: str, known: list[str]) -> str:
    """The end of a message: names that contain ``name``, else the nearest ones."""
    containing = [each for each in known if name and name in each][:_HINTS]
    if containing:
        return f"; did you mean {' or '.join(containing)}?"
    close = get_close_matches(name, known)
    return nearest(name, close) if close else "; kernelcat techniques lists all"
