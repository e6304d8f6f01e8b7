"""Who won: rows of one run compared with each other, and never with those of another run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernelcat.store.measurement import Measurement

TIE = 0.01
"""Medians closer than this share of the faster one are a tie."""

SUSTAINED, BURST, LADDER = "sustained", "burst", "ladder"
STATES = (SUSTAINED, BURST, LADDER)
"""``protocol.state`` of rows that raced: how the chip was treated (``kernelcat.bench.states``).

Races in different states are never compared. Calls go by the first state that a problem was raced
in, and so do tables: servers run hot.
"""

SCREEN = "screen"
"""``protocol.state`` of a quick first look. It decides nothing where raced rows exist."""


class Key(NamedTuple):
    """What a race is about."""

    gpu: str
    entry: str
    problem: str
    regime: str
    kind: str
    state: str

    @property
    def subject(self) -> tuple[str, str, str, str, str]:
        """The same without the state."""
        return self[:5]


@dataclass(frozen=True)
class Race:
    """One run's comparison on one problem.

    Attributes
    ----------
    rows : the best configuration of every language and variant, best first; never empty
    peers : somebody else's implementations in the same run, fastest first
    """

    key: Key
    run: str
    rows: tuple[Measurement, ...]
    peers: tuple[Measurement, ...]

    @property
    def winner(self) -> Measurement:
        return self.rows[0]

    @property
    def rivals(self) -> tuple[Measurement, ...]:
        return self.rows[1:]

    @property
    def created_at(self) -> str:
        return max(row.created_at for row in self.rows)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return self.rows + self.peers


def newest_races(measurements: Iterable[Measurement]) -> list[Race]:
    """The newest race of every (gpu, entry, problem, regime, kind, state), sorted by that key.

    What was only screened counts where its subject was raced in no state.
    """
    groups: dict[Key, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for row in measurements:
        if row.status == "passed":
            key = Key(row.gpu, row.entry, row.problem_key, row.regime, row.kind, row.state)
            groups[key][row.run].append(row)
    found = [race for key, runs in groups.items() if (race := _newest(key, runs))]
    raced = {race.key.subject for race in found if race.key.state != SCREEN}
    kept = (r for r in found if r.key.state != SCREEN or r.key.subject not in raced)
    return sorted(kept, key=lambda race: race.key)


def decisive(races: Iterable[Race]) -> list[Race]:
    """One race of each subject, sorted by key: the one in the first of :data:`STATES`."""
    chosen: dict[tuple[str, ...], Race] = {}
    for race in sorted(races, key=lambda race: (preference(race.key.state), race.key)):
        chosen.setdefault(race.key.subject, race)
    return sorted(chosen.values(), key=lambda race: race.key)


def preference(state: str) -> int:
    """The place of ``state`` among :data:`STATES`; those that did not race come last."""
    return STATES.index(state) if state in STATES else len(STATES)


def rank(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows of one race, best first.

    The tuner's declared winner leads. Without one, those within :data:`TIE` of the fastest lead,
    ordered by language, variant and configuration, so that two tunes give one answer.
    """
    if not rows:
        return []
    fastest = min(_median(row) for row in rows)

    def place(row: Measurement) -> tuple[bool, float, str, str, str]:
        tied = _median(row) <= fastest * (1 + TIE)
        median = 0.0 if tied else _median(row)
        return not row.winner, median, row.language, row.variant, row.config_key

    return sorted(rows, key=place)


def tied(a: Measurement, b: Measurement) -> bool:
    """Whether two rows of one run differ by less than :data:`TIE` or overlap in their intervals."""
    low, high = sorted((_median(a), _median(b)))
    if high <= low * (1 + TIE):
        return True
    return bool(a.ci_us and b.ci_us and a.ci_us[0] <= b.ci_us[1] and b.ci_us[0] <= a.ci_us[1])


def _newest(key: Key, runs: dict[str, list[Measurement]]) -> Race | None:
    own = {run: [row for row in rows if not row.is_peer] for run, rows in runs.items()}
    contested = [run for run, rows in own.items() if rows]
    if not contested:
        return None
    run = max(contested, key=lambda run: (*max(_evidence(row) for row in own[run]), run))
    best: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in _last_looks(own[run]):
        best[row.language, row.variant].append(row)
    peers = {row.variant: row for row in _last_looks([r for r in runs[run] if r.is_peer])}
    return Race(
        key,
        run,
        tuple(rank([rank(rows)[0] for rows in best.values()])),
        tuple(sorted(peers.values(), key=lambda row: (_median(row), row.variant))),
    )


def _last_looks(rows: list[Measurement]) -> list[Measurement]:
    """The last row of every configuration."""
    ordered = sorted(rows, key=_evidence)
    return list({(r.language, r.variant, r.config_key): r for r in ordered}.values())


def _evidence(row: Measurement) -> tuple[str, int]:
    """What makes one run count more than another; ``Store.winners`` orders by the same."""
    return row.created_at, row.samples


def _median(row: Measurement) -> float:
    assert row.median_us is not None, "only passed rows race"
    return row.median_us
