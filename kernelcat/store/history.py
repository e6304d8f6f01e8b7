"""Races of the past: the winner of each run and its fastest peer, for the winner over time.

``tuning_db/history/`` has the races that newer ones replaced in ``tuning_db/``, in the same form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelcat import paths
from kernelcat.store.lines import read_all
from kernelcat.store.measurement import Measurement
from kernelcat.store.origin import SHIPPED
from kernelcat.store.races import STATES, Key, newest_races, rank


@dataclass(frozen=True)
class Past:
    """One run's race on one problem.

    Attributes
    ----------
    winner : the row that the tuner declared the winner, else the best row
    peer : the fastest peer of the run; None where none raced
    """

    winner: Measurement
    peer: Measurement | None

    @property
    def key(self) -> Key:
        return Key.of(self.winner)

    @property
    def ratio(self) -> float | None:
        """The peer's time over the winner's: above 1 the winner is faster; None without a peer."""
        if self.peer is None or not self.peer.median_us or not self.winner.median_us:
            return None
        return self.peer.median_us / self.winner.median_us

    @property
    def rows(self) -> list[Measurement]:
        return [self.winner] if self.peer is None else [self.winner, self.peer]


def past_races(rows: Iterable[Measurement]) -> list[Past]:
    """The races of ``rows``, by key, then from old to new. Screenings and predictions are none."""
    runs: dict[tuple[Key, str], dict[str, Measurement]] = defaultdict(dict)
    for row in rows:
        if row.status == "passed" and row.kind == "measured" and row.state in STATES:
            runs[Key.of(row), row.run][row.digest] = row
    past = [found for run in runs.values() if (found := _past(list(run.values())))]
    return sorted(past, key=lambda race: (race.key, race.winner.created_at, race.winner.run))


def replaced(rows: Iterable[Measurement], newest: Iterable[Measurement]) -> list[Measurement]:
    """Winners and fastest peers of the races in ``rows`` that a newer race in ``newest`` replaced.

    Left out are races on problems that ``newest`` does not have.
    """
    runs = {race.key: race.run for race in newest_races(newest)}
    return [
        row
        for race in past_races(rows)
        if runs.get(race.key, race.winner.run) != race.winner.run
        for row in race.rows
    ]


def shipped(entry: str | None = None) -> list[Measurement]:
    """The rows of ``tuning_db/history/``, of one entry or of all; raises ``StoreError``."""
    files = sorted((paths.data("tuning_db") / "history").glob("*.jsonl"))
    rows = (row for file in files for row in read_all(file, SHIPPED))
    return [row for row in rows if entry in (None, row.entry)]


def _past(rows: Sequence[Measurement]) -> Past | None:
    """The race of one run's rows; None without a row that is not a peer's."""
    ours = rank([row for row in rows if not row.is_peer])
    peers = [row for row in rows if row.is_peer]
    if not ours:
        return None
    peers.sort(key=lambda row: (row.median_us or 0, row.variant))
    return Past(ours[0], peers[0] if peers else None)
