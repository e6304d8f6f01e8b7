"""Races on random problems as text: a line for each race, reasons of losses, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from kernelcat import catalog
from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.spec import Problem
from kernelcat.report.sheet import Sheet
from kernelcat.runtime.gpu import SKUS, Gpu
from kernelcat.store.random_races import LOW_SHARE, RandomRace, RandomRaces

MAX_IDLE = 0.25
"""Share of the multiprocessors' time in the last wave that may be idle and is no reason."""


def line(race: RandomRace) -> str:
    """One race in one line: number, what served, the times and ratio, or what failed."""
    served = f"{race.number}: {race.implementation or 'nothing serves'} ({race.why})"
    if race.failed is not None:
        return f"{served} failed: {race.failed}"
    parts = (
        f"{served} {_us(race.us)}, {race.best_peer or 'no peer'} {_best_us(race)} {_ratio(race)}"
    )
    return parts if race.tuned_us is None else f"{parts}, tuned {_us(race.tuned_us)}"


def summary(races: RandomRaces) -> str:
    """Number of races; mean, 5th percentile and worst of the ratios; regret, in one sentence."""
    failed = sum(race.failed is not None for race in races.races)
    alone = sum(race.ratio is None for race in races.races)
    parts = [f"{len(races.races)} problems"]
    if races.ratios:
        worst = min(races.races, key=lambda race: (race.ratio is None, race.ratio))
        parts += [f"geometric mean {races.geometric_mean:.3f}",
                  f"{LOW_SHARE:.0%} percentile {races.low_percentile:.3f}",
                  f"worst {worst.ratio:.3f} (number {worst.number})"]  # fmt: skip
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{alone} without a peer"] if alone else []
    if races.regret is not None:
        count, worst_slowdown = len(races.slowdowns), races.slowdowns[-1]
        parts.append(
            f"regret {races.regret:.1%} in the mean of {count} tunes, {worst_slowdown - 1:.1%} at "
            "worst"
        )
    return ", ".join(parts)


def overall(files: Sequence[RandomRaces]) -> list[str]:
    """A summary over all seeds for each GPU that has several files; all are of one entry.

    Unusual problems have a summary of their own.
    """
    by_gpu: dict[tuple[str, str], list[RandomRaces]] = {}
    for races in files:
        by_gpu.setdefault((races.gpu, _kind(races)), []).append(races)
    return [
        f"{several[0].entry} on {gpu}, {len(several)} seeds of {kind}: "
        + summary(replace(several[0], races=tuple(race for each in several for race in each.races)))
        for (gpu, kind), several in by_gpu.items()
        if len(several) > 1
    ]


def _kind(races: RandomRaces) -> str:
    return "unusual problems" if races.unusual else "random problems"


# ---- reasons ------------------------------------------------------------------------------------


def reason(race: RandomRace, entry: str, gpu: Gpu) -> str:
    """Why a race took its time: what the choice rests on, and what bounds it.

    The bound is the longest of three least times (bytes from DRAM, arithmetic, launches) with its
    share of the time, and how full the waves of thread blocks are, if one block runs on an SM.
    """
    return "; ".join(filter(None, (_choice(race), _bound(race, entry, gpu), _waves(race, gpu))))


def _choice(race: RandomRace) -> str:
    """``nearest (M=64, K=7168)``: the axes in which the measured problem differs."""
    evidence = race.evidence or {}
    differing = [f"{name}={v}" for name, v in evidence.items() if race.problem.get(name) != v]
    return f"{race.why} ({', '.join(differing)})" if differing else str(race.why)


def _bound(race: RandomRace, entry: str, gpu: Gpu) -> str:
    specification, problem = catalog.entry(entry), Problem.of(entry, **race.problem)
    dtype = specification.product_dtype(problem)
    least = {
        "bytes": gpu.roofline_us(0, specification.bytes_moved(problem), dtype),
        "arithmetic": gpu.roofline_us(specification.flops(problem), 0, dtype),
        "launches": LAUNCH_US * max(1, len(race.grids)),
    }
    name = max(least, key=lambda each: least[each])
    return f"{name} {least[name] / race.us:.0%} of the time" if race.us else name


def _waves(race: RandomRace, gpu: Gpu) -> str:
    waves = max(race.grids, default=0) / gpu.sms
    is_full = not waves or waves / ceil(waves) > 1 - MAX_IDLE
    return "" if is_full else f"{waves:.2f} waves"


# ---- the table ----------------------------------------------------------------------------------


def sheet(races: RandomRaces) -> Sheet:
    """The table of all races, worst first; axes that all problems share are in a note."""
    problems = [race.problem for race in races.races]
    names = catalog.entry(races.entry).axis_names if problems else []
    varying = [name for name in names if len({str(axes[name]) for axes in problems}) > 1]
    shared = [f"{name}={problems[0][name]}" for name in names if name not in varying]
    ordered = sorted(races.races, key=lambda race: (race.ratio is None, race.ratio, race.number))
    tuned = ("tuned µs",) if races.slowdowns else ()
    return Sheet(
        f"{races.entry} on {races.gpu}, {_kind(races)}, {races.regime} regime, {races.state}",
        ("number", *varying, "served by", "why", "µs", "best peer", "µs", "ratio", *tuned),
        [
            (
                str(race.number),
                *(str(race.problem[name]) for name in varying),
                (race.implementation or "nothing").removeprefix(f"{races.entry}/"),
                race.why or "",
                _us(race.us),
                race.best_peer or "",
                _best_us(race),
                _ratio(race),
                *(_us(race.tuned_us) for _ in tuned),
            )
            for race in ordered
        ],
        [
            f"{summary(races)}.",
            "Ratio: the best peer's time over ours in one race; 0 where ours failed. Regret: our "
            "time over that of a short tune's choice, less 1.",
            f"Seed {races.seed}; every problem has {', '.join(shared) or 'other axes'}.",
            *(f"{race.number} failed: {race.failed}" for race in ordered if race.failed),
            *_losses(ordered, races),
            *(f"{race.number} has no tune: {race.untuned}" for race in ordered if race.untuned),
        ],
        slice(0, None),
    )


def _losses(ordered: list[RandomRace], races: RandomRaces) -> list[str]:
    """A line for each race that a peer won, worst first: what served and why it took its time."""
    gpu = SKUS.get(races.gpu)
    if gpu is None:
        return []
    return [
        f"{race.number} lost: {race.implementation}, {reason(race, races.entry, gpu)}"
        for race in ordered
        if race.us and race.ratio is not None and race.ratio < 1
    ]


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _best_us(race: RandomRace) -> str:
    return _us(race.peers[race.best_peer]) if race.best_peer else ""


def _ratio(race: RandomRace) -> str:
    return "" if race.ratio is None else f"{race.ratio:.3f}"
