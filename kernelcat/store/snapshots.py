"""Snapshots for the call path: shipped and local results, read once into memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kernelcat import paths
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.store import plausibility
from kernelcat.store.lines import ENVIRONMENT, Reader
from kernelcat.store.location import locate
from kernelcat.store.measurement import PEER, Measurement
from kernelcat.store.origin import SHIPPED
from kernelcat.store.races import Race, newest_races, preference

REGIME = "graph"
"""Calls are decided by times of this regime."""
_PEERS = f'"language":"{PEER}"'.encode()
CALL_TIMEOUT_S = 1.0
"""Seconds that a call waits for a locked database before it uses shipped results only."""


@dataclass(frozen=True)
class Choice:
    """The best configuration of one variant for a problem, from a race.

    Attributes
    ----------
    gpu : SKU
    kind : ``measured`` or ``predicted``
    median_us : microseconds
    source : digest of the implementation that was measured
    origin : ``local``, ``shipped`` with the package, or the file or database it was imported from
    compilers : compiler -> version at the time of the measurement
    row : the measurement itself, if it is known
    """

    entry: str
    gpu: str
    problem: Problem
    language: str
    variant: str
    config: Config
    kind: str
    median_us: float
    source: str
    run: str
    origin: str
    compilers: Mapping[str, str] = field(default_factory=dict, hash=False)
    row: Measurement | None = field(default=None, compare=False, repr=False)

    @property
    def doubt(self) -> str | None:
        """Why the measurement cannot be true, or None."""
        return None if self.row is None else plausibility.doubt(self.row)


class Known(NamedTuple):
    """What is known about an entry: choices, and rows of configurations that were found wrong."""

    choices: tuple[Choice, ...]
    refuted: tuple[Measurement, ...]


class Snapshot:
    """Choices by entry. The results of an entry are read once, at the first use.

    A database that is locked, damaged or from a newer kernelcat never raises: it counts as empty,
    with one warning. So does a missing database that an argument or ``$KERNELCAT_DB`` names.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._known: dict[str, Known] = {}
        location = locate(url)
        # A missing default database needs no warning: nothing was tuned yet.
        self._has_local = location.named or location.path is None or location.path.exists()

    def choices(self, entry: str) -> tuple[Choice, ...]:
        """The best configuration of every variant of ``entry``, from shipped and local races.

        The choices of one (gpu, problem, kind) follow each other, best first: where a language is
        not installed, the next choice serves.
        """
        return self._of(entry).choices

    def refuted(self, entry: str) -> tuple[Measurement, ...]:
        """The rows of the local database whose results were found wrong."""
        return self._of(entry).refuted

    def _of(self, entry: str) -> Known:
        if entry not in self._known:
            races, refuted = self._local(entry) if self._has_local else ([], [])
            choices = _merge(newest_races(_shipped(entry)), races)
            self._known[entry] = Known(choices, tuple(refuted))
        return self._known[entry]

    def _local(self, entry: str) -> tuple[list[Race], list[Measurement]]:
        """The newest races, those in the places of doubtful ones, and the rows found wrong."""
        try:
            from kernelcat.store.database import Store

            with Store.open(self._url, create=False, timeout=CALL_TIMEOUT_S) as store:
                races = store.winners(entry=entry, regime=REGIME)
                races += plausibility.sound(races, store)
                return races, store.rows(entry=entry, kind="measured", status="wrong")
        except KernelcatError as error:
            self._has_local = False
            warnings.warn(f"{error}. Using shipped results only", stacklevel=5)
            return [], []


def snapshot(url: str | None = None) -> Snapshot:
    """A snapshot of the shipped results and of a database (default: the user's own)."""
    return Snapshot(url)


def _shipped(entry: str) -> Iterator[Measurement]:
    """The shipped rows of ``entry`` in :data:`REGIME`, without those of peers."""
    name, regime = f'"entry":"{entry}"'.encode(), f'"regime":"{REGIME}"'.encode()
    for path in sorted(paths.data("tuning_db").glob("*.jsonl")):
        reader = Reader(SHIPPED)
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            # Lines are canonical JSON, so that most of them need no parsing. The line of a race (or
            # of a row that has all fields) contains the entry and the regime.
            has_both = name in line and regime in line
            is_wanted = (has_both or reader.has_race(line)) and _PEERS not in line
            if not is_wanted and not line.startswith(ENVIRONMENT):
                continue
            try:
                row = reader.row(line)
            except InvalidArgument as error:
                warnings.warn(f"{path}:{number} is skipped: {error}", stacklevel=5)
                continue
            if row is not None:
                yield row


def _merge(shipped: Iterable[Race], local: Iterable[Race]) -> tuple[Choice, ...]:
    """The choices of all races, by subject, then by preference of the state, then newest first.

    A configuration that several races of a subject have counts in the first of these races only,
    and a doubtful row takes the place of no other row.
    """
    ordered = sorted((*shipped, *local), key=lambda race: race.created_at, reverse=True)
    ordered.sort(key=lambda race: (race.key.subject, preference(race.key.state)))
    choices: dict[tuple[str | None, ...], Choice] = {}
    for race in ordered:
        for row in race.rows:
            doubt = None if row.origin == SHIPPED else plausibility.doubt(row)
            name = (*race.key.subject, row.language, row.variant, row.config_key, doubt)
            choices.setdefault(name, _choice(row))
    return tuple(choices.values())


def _choice(row: Measurement) -> Choice:
    assert row.median_us is not None, "only passed rows race"
    return Choice(
        entry=row.entry,
        gpu=row.gpu,
        problem=row.to_problem(),
        language=row.language,
        variant=row.variant,
        config=row.to_config(),
        kind=row.kind,
        median_us=row.median_us,
        source=row.source,
        run=row.run,
        origin=row.origin,
        compilers=row.environment.get("compilers", {}),
        row=row,
    )
