"""Misses: the problems of a workload that ran on a GPU on which nobody had measured them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernelcat import catalog
from kernelcat.call.choice import choose
from kernelcat.errors import KernelcatError, UnknownName
from kernelcat.report.sheet import Sheet
from kernelcat.runtime import gpu as gpus
from kernelcat.store import Snapshot, snapshot
from kernelcat.store.workload import Use, shares

NO_MISS = ("exact", "forced")
"""Reasons of a use that is no miss: the problem was measured, or the caller pinned a kernel."""


@dataclass(frozen=True)
class Miss:
    """A use whose problem was not measured on its GPU, and is not today.

    ``share`` is its part of the device time of all uses on GPUs of this SKU (0 to 1).
    """

    use: Use
    share: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.use), "share": round(self.share, 4)}


@dataclass(frozen=True)
class Misses:
    """The misses of a workload, those that cost most first.

    Attributes
    ----------
    gpu : only uses on this SKU were looked at; None for all
    looked_at : number of uses that were looked at
    """

    gpu: str | None
    misses: tuple[Miss, ...]
    looked_at: int

    def sheet(self) -> Sheet:
        """The misses as a table."""
        return Sheet(
            f"Not measured{f' on {self.gpu}' if self.gpu else ''}",
            ("entry", "problem", "gpu", "served by", "why", "calls", "captured", "µs", "time from",
             "of the time"),
            [
                (miss.use.entry, _description(miss.use), miss.use.gpu,
                 miss.use.served.removeprefix(f"{miss.use.entry}/"), miss.use.why,
                 str(miss.use.calls), str(miss.use.captured), f"{miss.use.us:.1f}", miss.use.basis,
                 f"{miss.share:.1%}")
                for miss in self.misses
            ],
            [
                f"{len(self.misses)} of {self.looked_at} uses. Their times are no measurements of "
                "these problems.",
                "Calls that CUDA graphs captured count once; replays are not seen.",
            ],
            slice(5, 8),
        )  # fmt: skip


def misses(uses: Sequence[Use], gpu: str | None = None, url: str | None = None) -> Misses:
    """The uses on SKU ``gpu`` (None: on any) that ran unmeasured, and are unmeasured today.

    ``url`` names the database that says what is measured today; None is the user's own. Raises
    ``StoreError`` never: a database that cannot be read counts as empty, with a warning.
    """
    uses = [use for use in uses if gpu in (None, use.gpu)]
    known = snapshot(url)
    found = [
        Miss(use, share)
        for use, share in zip(uses, shares(uses), strict=True)
        if use.why not in NO_MISS and not _is_measured(use, known)
    ]
    return Misses(gpu, tuple(found), len(uses))


def _is_measured(use: Use, known: Snapshot) -> bool:
    """Whether a call of the problem is served by a measurement of it by now."""
    try:
        entry = catalog.entry(use.entry)
        problem = entry.problem(**use.problem)
        choices, refuted = known.choices(entry.name), known.refuted(entry.name)
        decision = choose(entry, problem, gpus.find(use.gpu), choices, refuted=refuted)
    except KernelcatError:  # of another version, or nothing serves the problem any more
        return False
    return decision.why == "exact"


def _description(use: Use) -> str:
    """The problem's name, or its axes without defaults, as ``--problem`` takes them."""
    try:
        entry = catalog.entry(use.entry)
    except UnknownName:
        return ",".join(f"{axis}={value}" for axis, value in use.problem.items())
    told = {a.name: use.problem[a.name] for a in entry.axes if a.name in use.problem}
    axes = (f"{axis}={v}" for axis, v in told.items() if entry.defaults.get(axis) != v)
    return entry.problem_name(use.asked) or ",".join(axes)
