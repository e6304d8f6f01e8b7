"""Races and their winners. Only rows of one run are compared with each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernelcat.store.measurement import Measurement
from kernelcat.store.origin import LOCAL, UNKNOWN, is_imported

TIE = 0.01
"""Medians are a tie if they differ by at most this share of the faster median."""

SUSTAINED, BURST, LADDER = "sustained", "burst", "ladder"
STATES = (SUSTAINED, BURST, LADDER)
"""``protocol.state`` of rows that raced: thermal state of the chip (:mod:`kernelcat.bench.states`).

Races in different states are never compared. Calls and tables use the first of these states in
which a problem was raced; ``sustained`` is first because servers run hot.
"""

SCREEN = "screen"
"""``protocol.state`` of the quick first measurement. It is ignored where raced rows exist."""


class Key(NamedTuple):
    """What identifies a race: only rows with equal keys are compared."""

    gpu: str
    entry: str
    problem: str
    regime: str
    kind: str
    state: str

    @staticmethod
    def of(row: Measurement) -> Key:
        return Key(row.gpu, row.entry, row.problem_key, row.regime, row.kind, row.state)

    @property
    def subject(self) -> tuple[str, str, str, str, str]:
        """The key without the state."""
        return self[:5]


class Run(NamedTuple):
    """A run, as one origin brought it."""

    name: str
    origin: str


@dataclass(frozen=True)
class Race:
    """One run's comparison on one problem.

    Attributes
    ----------
    rows : the best configuration of every language and variant, best first; never empty
    peers : rows of peers in the same run, fastest first
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
    def origin(self) -> str:
        return self.winner.origin

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        return self.rows + self.peers


def newest_races(measurements: Iterable[Measurement]) -> list[Race]:
    """The newest race of every (gpu, entry, problem, regime, kind, state), sorted by that key.

    A screening counts as a race if its subject was raced in no other state. A race that was
    measured here outranks every imported race of its key.
    """
    groups: dict[Key, dict[Run, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for row in measurements:
        if row.status == "passed":
            groups[Key.of(row)][Run(row.run, row.origin)].append(row)
    races = [race for key, runs in groups.items() if (race := _newest(key, runs))]
    subjects = {race.key.subject for race in races if race.key.state != SCREEN}
    decided = (r for r in races if r.key.state != SCREEN or r.key.subject not in subjects)
    return sorted(decided, key=lambda race: race.key)


def decisive(races: Iterable[Race]) -> list[Race]:
    """The race of each subject whose state comes first in :data:`STATES`, sorted by key."""
    by_subject: dict[tuple[str, ...], Race] = {}
    for race in sorted(races, key=lambda race: (preference(race.key.state), race.key)):
        by_subject.setdefault(race.key.subject, race)
    return sorted(by_subject.values(), key=lambda race: race.key)


def preference(state: str) -> int:
    """Index of ``state`` in :data:`STATES`; any other state comes last."""
    return STATES.index(state) if state in STATES else len(STATES)


def rank(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows of one race, best first.

    The row that the tuner declared the winner is first. Then follow the rows within :data:`TIE` of
    the fastest, ordered by language, variant and configuration so that two tunes give one answer,
    then the others by time.
    """
    if not rows:
        return []
    fastest = min(microseconds(row) for row in rows)

    def place(row: Measurement) -> tuple[bool, float, str, str, str]:
        is_tied = microseconds(row) <= fastest * (1 + TIE)
        median = 0.0 if is_tied else microseconds(row)
        return not row.winner, median, row.language, row.variant, row.config_key

    return sorted(rows, key=place)


def tied(a: Measurement, b: Measurement) -> bool:
    """Whether two rows of one run are a tie: within :data:`TIE`, or their intervals overlap."""
    low, high = sorted((microseconds(a), microseconds(b)))
    if high <= low * (1 + TIE):
        return True
    return bool(a.ci_us and b.ci_us and a.ci_us[0] <= b.ci_us[1] and b.ci_us[0] <= a.ci_us[1])


def _newest(key: Key, runs: dict[Run, list[Measurement]]) -> Race | None:
    """The race of the newest run; None if all rows are peers'.

    Where a run was measured here, imported runs do not count. Runs of two origins are two runs,
    also if they have one name.
    """
    ours = {run: [row for row in rows if not row.is_peer] for run, rows in runs.items()}
    runs_with_ours = [run for run, rows in ours.items() if rows]
    if any(run.origin in (LOCAL, UNKNOWN) for run in runs_with_ours):
        runs_with_ours = [run for run in runs_with_ours if not is_imported(run.origin)]
    if not runs_with_ours:
        return None
    run = max(runs_with_ours, key=lambda run: (*max(_evidence(row) for row in ours[run]), run))
    by_variant: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in _last_rows(ours[run]):
        by_variant[row.language, row.variant].append(row)
    peers = {row.variant: row for row in _last_rows([r for r in runs[run] if r.is_peer])}
    return Race(
        key,
        run.name,
        tuple(rank([rank(rows)[0] for rows in by_variant.values()])),
        tuple(sorted(peers.values(), key=lambda row: (microseconds(row), row.variant))),
    )


def _last_rows(rows: list[Measurement]) -> list[Measurement]:
    """The last row of every configuration."""
    ordered = sorted(rows, key=_evidence)
    return list({(r.language, r.variant, r.config_key): r for r in ordered}.values())


def _evidence(row: Measurement) -> tuple[str, int]:
    """Time and samples, by which runs are ordered; ``Store.winners`` orders in the same way."""
    return row.created_at, row.samples


def microseconds(row: Measurement) -> float:
    """The median of a row that passed, in microseconds."""
    assert row.median_us is not None, "only passed rows race"
    return row.median_us
