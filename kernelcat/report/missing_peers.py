"""Problems that were measured without a peer, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelcat import catalog
from kernelcat.report.sheet import Sheet
from kernelcat.store import Measurement

RACE_AGAIN = "a peer may take it today: race it again"
"""The reason where the specification has none."""


@dataclass(frozen=True)
class Unpeered:
    """A named problem that was measured on ``gpu`` (SKU), and no peer with it.

    ``reason`` is why no peer computes the problem; None where one of today's peers may.
    """

    entry: str
    gpu: str
    problem: str
    reason: str | None

    @property
    def text(self) -> str:
        return self.reason or RACE_AGAIN


def missing(rows: Iterable[Measurement]) -> list[Unpeered]:
    """The named problems of ``rows`` that were measured without any peer, by entry, in order."""
    measured: dict[tuple[str, str, str], bool] = {}
    for row in rows:
        if row.kind == "measured" and row.status == "passed" and row.entry in catalog.names():
            key = (row.entry, row.gpu, row.problem_key)
            measured[key] = measured.get(key, False) or row.is_peer
    found = []
    for entry in map(catalog.entry, catalog.names()):
        for name, problem in entry.problems.items():
            for gpu in sorted({key[1] for key in measured}):
                if measured.get((entry.name, gpu, problem.key)) is False:
                    found.append(Unpeered(entry.name, gpu, name, entry.why_no_peer(name)))
    return found


def by_reason(rows: Iterable[Measurement]) -> dict[str, list[str]]:
    """Reason -> names of the problems, of the rows of one entry."""
    groups: dict[str, dict[str, None]] = {}
    for each in missing(rows):
        groups.setdefault(each.text, {})[each.problem] = None
    return {reason: list(names) for reason, names in groups.items()}


def markdown(rows: Iterable[Measurement]) -> str:
    """A line for each reason and its problems, of the rows of one entry; empty without such."""
    lines = ((", ".join(f"`{name}`" for name in names), why)
             for why, names in by_reason(rows).items())  # fmt: skip
    return "".join(f"- {names}: {why}.\n" for names, why in lines)


def sheet(found: Sequence[Unpeered]) -> Sheet:
    """A line for each entry and reason, with its problems."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in found:
        groups.setdefault((each.entry, each.gpu, each.text), []).append(each.problem)
    return Sheet(
        title="Problems that were measured without a peer",
        headers=("entry", "GPU", "problems", "why"),
        lines=[(entry, gpu, ", ".join(names), why) for (entry, gpu, why), names in groups.items()],
        notes=(f"{len(found)} problems.",),
        numbers=slice(0, 0),
    )
