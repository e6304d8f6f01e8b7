"""Profiles as a table: the bytes that kernels moved, as the hardware counted them."""

from __future__ import annotations

from collections.abc import Sequence

from kernelcat.catalog.spec import Problem
from kernelcat.report.grid import STALE
from kernelcat.report.ladder import height, installed
from kernelcat.report.sheet import Sheet
from kernelcat.verify.profiles import Profile

_HEADERS = ("variant", "problem", "DRAM read", "DRAM written", "× least", "SMs read from L2",
            "arrived in SMs", "all of L2")  # fmt: skip
_NOTES = (
    "MB of one call with cold caches, counted by the hardware (Nsight Compute).",
    "× least: DRAM bytes over the fewest that any kernel must move.",
    "A multicast load is read once from L2 and arrives in several SMs.",
)


def sheet(profiles: Sequence[Profile]) -> Sheet:
    """A table of ``profiles`` (at least one, all of one entry and GPU), in MB.

    The lines are sorted by problem, then as in the ladder.
    """
    entry, gpu = profiles[0].entry, profiles[0].gpu
    implementations = installed(entry)
    ordered = sorted(
        profiles, key=lambda p: (p.key[2], height(implementations, p.language, p.variant))
    )
    stale = f"{STALE} stale: the kernel's sources changed since; profile again."
    return Sheet(
        title=f"{entry} on {gpu}",
        headers=_HEADERS,
        lines=[_line(profile) for profile in ordered],
        notes=(*_NOTES, stale) if any(p.stale for p in profiles) else _NOTES,
        numbers=slice(2, None),
    )


def _line(profile: Profile) -> tuple[str, ...]:
    counts = profile.counts
    config = profile.config if profile.asked else {}
    parameters = "".join(f" {name}={value}" for name, value in config.items())
    return (
        f"{profile.language}/{profile.variant}{STALE if profile.stale else ''}{parameters}",
        profile.problem_name or str(Problem.of(profile.entry, **profile.problem)),
        _megabytes(counts.dram_read_bytes),
        _megabytes(counts.dram_write_bytes),
        f"{profile.overhead:.2f}",
        _megabytes(counts.l2_read_bytes),
        _megabytes(counts.sm_read_bytes),
        _megabytes(counts.l2_bytes),
    )


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
