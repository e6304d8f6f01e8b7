"""Techniques, in groups, and their state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernelcat.report.techniques.evidence import COMPILED, LEVELS, Evidence

NOT_YET, DOES_NOT_APPLY = "not yet", "does not apply"
STATES = (*LEVELS, NOT_YET, DOES_NOT_APPLY)
"""All states of a technique, best first."""


@dataclass(frozen=True)
class Technique:
    """One technique.

    Attributes
    ----------
    name : the field's usual name
    explanation : a paragraph: what it is, what it buys, what it costs
    source : who described it, or where it is documented
    evidence : why to believe that the catalog uses it
    modules : paths of files that use it, relative to the root of the repository
    aliases : other names
    not_yet : what is missing; beside evidence, the part that is missing
    does_not_apply : why it is no technique for this catalog; then there is no evidence
    """

    name: str
    explanation: str
    source: str
    evidence: tuple[Evidence, ...] = ()
    modules: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    not_yet: str = ""
    does_not_apply: str = ""

    @property
    def state(self) -> str:
        """One of :data:`STATES`; with evidence, the strongest level of the evidence."""
        if self.does_not_apply:
            return DOES_NOT_APPLY
        levels = {each.level for each in self.evidence}
        return next((level for level in LEVELS if level in levels), NOT_YET)

    @property
    def is_covered(self) -> bool:
        """Whether there is evidence that ran: code that was compiled only does not count."""
        return self.state in LEVELS and self.state != COMPILED

    @property
    def implementations(self) -> tuple[str, ...]:
        """Names of the implementations of the evidence, each once."""
        names = (name for each in self.evidence for name in each.implementations)
        return tuple(dict.fromkeys(names))

    @property
    def where(self) -> tuple[str, ...]:
        """Implementations, then modules."""
        return (*self.implementations, *self.modules)

    @property
    def slug(self) -> str:
        """GitHub's anchor of a heading with this name."""
        return slug(self.name)

    def faults(self, root: Path) -> list[str]:
        """Why the record is wrong: evidence that does not hold, files that are not there."""
        faults = [fault for each in self.evidence for fault in each.faults()]
        faults += [f"there is no file {p}" for p in self.modules if not (root / p).exists()]
        if self.does_not_apply and self.evidence:
            faults.append("what does not apply has evidence")
        if not (self.evidence or self.not_yet or self.does_not_apply):
            faults.append("neither evidence nor a reason")
        return [f"{self.name}: {fault}" for fault in faults]


@dataclass(frozen=True)
class Group:
    """Techniques of one topic, as people learn them."""

    name: str
    techniques: tuple[Technique, ...]

    @property
    def slug(self) -> str:
        return slug(self.name)


def slug(name: str) -> str:
    """GitHub's anchor of a heading: lower case, hyphens for spaces, no punctuation."""
    kept = (c if c.isalnum() or c in "-_" else " " if c == " " else "" for c in name.lower())
    return "".join(kept).replace(" ", "-")


def tally(techniques: Iterable[Technique]) -> dict[str, int]:
    """State -> number of techniques, for every state."""
    counts = Counter(each.state for each in techniques)
    return {state: counts[state] for state in STATES}
