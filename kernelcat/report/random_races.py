"""Races on random problems as text: a line for each race, and a table of all."""

from __future__ import annotations

from kernelcat import catalog
from kernelcat.report.sheet import Sheet
from kernelcat.store.random_races import LOW_SHARE, RandomRace, RandomRaces


def line(race: RandomRace) -> str:
    """One race in one line: number, what served, both times and the ratio, or what failed."""
    served = f"{race.number}: {race.implementation or 'nothing serves'} ({race.why})"
    if race.failed is not None:
        return f"{served} failed: {race.failed}"
    return f"{served} {_us(race.us)}, {race.best_peer or 'no peer'} {_best_us(race)} {_ratio(race)}"


def summary(races: RandomRaces) -> str:
    """Number of races, geometric mean, 5th percentile and worst of the ratios, in one sentence."""
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
    return ", ".join(parts)


def sheet(races: RandomRaces) -> Sheet:
    """The table of all races, worst first; axes that all problems share are in a note."""
    problems = [race.problem for race in races.races]
    names = catalog.entry(races.entry).axis_names if problems else []
    varying = [name for name in names if len({str(axes[name]) for axes in problems}) > 1]
    shared = [f"{name}={problems[0][name]}" for name in names if name not in varying]
    ordered = sorted(races.races, key=lambda race: (race.ratio is None, race.ratio, race.number))
    return Sheet(
        f"{races.entry} on {races.gpu}, random problems, {races.regime} regime, {races.state}",
        ("number", *varying, "served by", "why", "µs", "best peer", "µs", "ratio"),
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
            )
            for race in ordered
        ],
        [
            f"{summary(races)}.",
            "Ratio: the best peer's time over ours in one race; 0 where ours failed.",
            f"Seed {races.seed}; every problem has {', '.join(shared) or 'other axes'}.",
            *(f"{race.number} failed: {race.failed}" for race in ordered if race.failed),
        ],
        slice(0, None),
    )


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _best_us(race: RandomRace) -> str:
    return _us(race.peers[race.best_peer]) if race.best_peer else ""


def _ratio(race: RandomRace) -> str:
    return "" if race.ratio is None else f"{race.ratio:.3f}"
