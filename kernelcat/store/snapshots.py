"""What the call path knows: shipped and local results, read once into memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kernelcat import paths
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.store.lines import ENVIRONMENT, Reader
from kernelcat.store.location import locate
from kernelcat.store.measurement import PEER, Measurement
from kernelcat.store.races import Race, newest_races, preference

Origin = Literal["shipped", "local"]
REGIME = "graph"
_PEERS = f'"language":"{PEER}"'.encode()
CALL_TIMEOUT_S = 1.0
"""How long a call waits for a locked database before it goes on without."""


@dataclass(frozen=True)
class Choice:
    """A configuration that some run found good for a problem.

    ``source`` is the digest of the kernel that was measured, ``kind`` tells measured from
    predicted, ``median_us`` is in microseconds, and ``compilers`` are their versions then.
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
    origin: Origin
    compilers: Mapping[str, str] = field(default_factory=dict, hash=False)


class Snapshot:
    """Choices by entry, each entry read when first asked for and then remembered.

    Never raises for the database's sake: one that is locked, damaged or newer counts as empty,
    with one warning; so does a missing one that was asked for by name.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._known: dict[str, tuple[Choice, ...]] = {}
        location = locate(url)
        # Where nothing was ever tuned, the default database is missing, and that is no news.
        self._has_local = location.named or location.path is None or location.path.exists()

    def choices(self, entry: str) -> tuple[Choice, ...]:
        """What is known of ``entry``: the best of every language and variant.

        Those of one (gpu, problem, kind) stand together, best first, so that the next one can
        serve where a language is not installed.
        """
        if entry not in self._known:
            local = self._local(entry) if self._has_local else []
            self._known[entry] = _merge(newest_races(_shipped(entry)), local)
        return self._known[entry]

    def _local(self, entry: str) -> list[Race]:
        try:
            from kernelcat.store.database import Store

            with Store.open(self._url, create=False, timeout=CALL_TIMEOUT_S) as store:
                return store.winners(entry=entry, regime=REGIME)
        except KernelcatError as error:
            self._has_local = False
            warnings.warn(f"{error}. Using shipped results only", stacklevel=4)
            return []


def snapshot(url: str | None = None) -> Snapshot:
    """What the shipped results and a database (``None``: the user's own) say now."""
    return Snapshot(url)


def _shipped(entry: str) -> Iterator[Measurement]:
    wanted, regime = f'"entry":"{entry}"'.encode(), f'"regime":"{REGIME}"'.encode()
    for path in sorted(paths.data("tuning_db").glob("*.jsonl")):
        reader = Reader()
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            # Lines are canonical JSON, so that most of them need no parsing.
            told = wanted in line and regime in line  # of a race, or of a row that has all fields
            is_wanted = (told or reader.has_race(line)) and _PEERS not in line
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
    """For one subject the preferred state's newest race leads; what only others have follows it."""
    origins: tuple[tuple[Origin, Iterable[Race]], ...] = (("shipped", shipped), ("local", local))
    newest = [(race, origin) for origin, found in origins for race in found]
    newest.sort(key=lambda pair: pair[0].created_at, reverse=True)
    newest.sort(key=lambda pair: (pair[0].key.subject, preference(pair[0].key.state)))
    choices: dict[tuple[str, ...], Choice] = {}
    for race, origin in newest:
        for row in race.rows:
            name = (*race.key.subject, row.language, row.variant, row.config_key)
            choices.setdefault(name, _choice(row, origin))
    return tuple(choices.values())


def _choice(row: Measurement, origin: Origin) -> Choice:
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
        origin=origin,
        compilers=row.environment.get("compilers", {}),
    )
