"""The winner over time: the ratio to the fastest peer in each race of a problem, old and new."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from itertools import groupby

from kernelcat.catalog.spec import Problem
from kernelcat.report.grid import duration, ratio
from kernelcat.report.sheet import Sheet
from kernelcat.report.site import plots
from kernelcat.report.site.markup import sheet, text
from kernelcat.store.history import Past
from kernelcat.store.races import Key

_NOTES = (
    "Each line is a race of its own. Days differ in clocks, drivers and peers, so that times of "
    "different races are not compared, but each race's winner with the peer beside it.",
)


def history_part(past: Sequence[Past], id_prefix: str = "history") -> str:
    """A plot and a table for each GPU, regime and state with a problem that was raced twice."""
    parts = []
    repeated = [
        race
        for _, races in groupby(past, key=lambda race: race.key)
        if len(group := list(races)) > 1
        for race in group
    ]
    repeated.sort(key=lambda race: _section(race.key))  # stable: by problem, then by time
    for i, (section, races) in enumerate(groupby(repeated, key=lambda race: _section(race.key))):
        listed = list(races)
        title = f"The winner over time on {section[0]}, {section[1]} regime, {section[2]}"
        parts.append(f"<h2>{text(title)}</h2>\n{_plot(listed)}")
        parts.append(sheet(f"{id_prefix}{i}", _sheet(title, listed), folded=True))
    return "".join(parts)


def _section(key: Key) -> tuple[str, str, str]:
    return key.gpu, key.regime, key.state


def _plot(past: Sequence[Past]) -> str:
    """The ratio over the day, a line for each problem; empty without a peer."""
    series = []
    for _, races in groupby(past, key=lambda race: race.key):
        points = [
            plots.Point(_day(race), race.ratio, f"{_title(race)}: {race.ratio:.2f}\u00d7 on "
                        f"{race.winner.created_at[:10]}, {_winner(race)}", race.ratio >= 1)
            for race in races
            if race.ratio
        ]  # fmt: skip
        if len(points) > 1:
            series.append(points)
    if not series:
        return ""
    return plots.timeline(
        "Ratio to the fastest peer of each race", "peer's time over ours", series,
        "A line joins the races of one problem. Dots: ours is at least as fast. Rings: the peer is "
        "faster.",
    )  # fmt: skip


def _day(race: Past) -> float:
    """Days since year 1, with the time of day as a fraction."""
    stamp = race.winner.created_at
    hours, minutes = int(stamp[11:13]), int(stamp[14:16])
    return date.fromisoformat(stamp[:10]).toordinal() + (hours + minutes / 60) / 24


def _sheet(title: str, past: Sequence[Past]) -> Sheet:
    headers = ("problem", "raced", "winner", "fastest peer", "µs", "× fastest peer")
    lines = [
        (
            _title(race),
            race.winner.created_at[:16].replace("T", " "),
            _winner(race),
            race.peer.variant if race.peer else "",
            _time(race),
            ratio(race.ratio),
        )
        for race in past
    ]
    return Sheet(title, headers, lines, _NOTES, slice(4, None))


def _title(race: Past) -> str:
    row = race.winner
    return row.problem_name or str(Problem.of(row.entry, **row.problem))


def _winner(race: Past) -> str:
    return f"{race.winner.language}/{race.winner.variant}"


def _time(race: Past) -> str:
    assert race.winner.median_us is not None, "only what was timed has raced"
    return duration(race.winner.median_us, race.winner.ci_us)
