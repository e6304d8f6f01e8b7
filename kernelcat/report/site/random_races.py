"""Races on random problems: ratios to the fastest peer, and what a tune would have gained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kernelcat.report import random_races
from kernelcat.report.site import plots
from kernelcat.report.site.markup import sheet, text
from kernelcat.store.random_races import RandomRace, RandomRaces


def random_part(files: Sequence[RandomRaces]) -> str:
    """Plots and a table for each file of races on random problems; empty without files."""
    parts = []
    for i, races in enumerate(files):
        gpu, seed = text(races.gpu), text(races.seed[:8])
        parts.append(f"<h2>Random problems on {gpu}, seed {seed}</h2>\n")
        parts.append(f"<p>{text(random_races.summary(races))}.</p>\n")
        parts.append(
            _plot("Ratio to the fastest peer on random problems", "peer's time over ours",
                  "Dots: ours is at least as fast. Rings: the peer is faster.",
                  races, lambda race: race.ratio, lambda ratio: ratio >= 1)
        )  # fmt: skip
        parts.append(
            _plot("Regret: our time over that of a short tune", "our time over the tune's",
                  "At the line, at 1, a tune gains nothing. Rings: a tune gains more than 5 %.",
                  races, lambda race: race.slowdown, lambda slowdown: slowdown <= 1.05)
        )  # fmt: skip
        parts.append(sheet(f"random{i}", random_races.sheet(races)))
    return "".join(parts)


def _plot(
    title: str,
    y_title: str,
    caption: str,
    races: RandomRaces,
    value: Callable[[RandomRace], float | None],
    is_good: Callable[[float], bool],
) -> str:
    """Values over our time; empty where no race has one. Failed races have no time and no point."""
    marks = [
        plots.Point(race.us, y, f"number {race.number}: {y:.2f}\u00d7", is_good(y))
        for race in races.races
        if race.us and (y := value(race))
    ]
    if not marks:
        return ""
    return plots.points(
        title, "our time in \u00b5s", y_title, marks, caption=caption, y_base=2, level=1.0
    )
