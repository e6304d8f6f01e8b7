"""Races on random problems: how an entry, as a program gets it, compares with its peers.

Problems follow from a seed, the hash of the commit that is raced, so nobody can choose them. A file
has the races of one entry, seed and GPU: JSON Lines, first what all races share, then a line for
each problem. ``tuning_db/random/`` has the files that come with the package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.errors import InvalidArgument
from kernelcat.store import headed_lines

SEED = re.compile("[0-9a-f]{40}")
"""A seed: the hash of a commit."""
LOW_SHARE = 0.05
"""Share of the ratios below the low percentile of a summary."""


@dataclass(frozen=True)
class RandomRace:
    """The race of one random problem.

    Attributes
    ----------
    number : index of the problem among those of the seed
    problem : values of the axes
    implementation, config : what serves a program; None where nothing does
    why : why this serves (:class:`kernelcat.call.choice.Decision`)
    evidence : values of the axes of the measured problem on which the choice rests, or None
    grids : thread blocks of each launch, where they are known
    source : digest of the implementation
    us : median time in microseconds; None where the race failed
    peers : peer -> median time in the same race, in microseconds
    skipped_peers : peer -> why the peer did not race
    l2 : ``cold`` or ``warm``
    failed : why there is no right result, or None
    tuned, tuned_config : what a short tune of this very problem chose; None without a tune
    tuned_us : its median time in the same race, in microseconds
    untuned : why the tune has no result, or None
    """

    number: int
    problem: Mapping[str, Any]
    implementation: str | None = None
    config: Mapping[str, Any] | None = None
    why: str | None = None
    evidence: Mapping[str, Any] | None = None
    grids: Sequence[int] = field(default_factory=list)
    source: str | None = None
    us: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    skipped_peers: Mapping[str, str] = field(default_factory=dict)
    l2: str | None = None
    failed: str | None = None
    tuned: str | None = None
    tuned_config: Mapping[str, Any] | None = None
    tuned_us: float | None = None
    untuned: str | None = None

    @property
    def best_peer(self) -> str | None:
        """The fastest peer, or None where no peer raced."""
        return min(self.peers, key=lambda name: (self.peers[name], name), default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the best peer over ours, 0 for a race that failed, None without a peer."""
        if self.us is None:
            return 0.0
        return self.peers[self.best_peer] / self.us if self.best_peer else None

    @property
    def slowdown(self) -> float | None:
        """Our time over the tune's, None where one of them is missing.

        At least 1: a longer tune would have tried what served, too.
        """
        return max(1.0, self.us / self.tuned_us) if self.us and self.tuned_us else None

    @property
    def has_tune(self) -> bool:
        """Whether nothing is left to tune: there is a result, or a reason why there is none."""
        return bool(self.tuned_us or self.untuned or self.failed)


@dataclass(frozen=True)
class RandomRaces:
    """The races of one entry on the problems of one seed.

    Attributes
    ----------
    gpu : SKU
    seed : hash of the commit that was raced
    regime, state : how the races were run (``graph``, ``burst``)
    created_at : ISO 8601, UTC
    environment : the machine and its compilers (:class:`kernelcat.runtime.environment.Environment`)
    races : in the order of their numbers
    unusual : whether the problems have sizes and options that no model has
    """

    entry: str
    gpu: str
    seed: str
    regime: str
    state: str
    created_at: str
    environment: Mapping[str, Any]
    races: tuple[RandomRace, ...] = ()
    unusual: bool = False

    @property
    def ratios(self) -> list[float]:
        """The ratios of all races that have one, in ascending order."""
        return sorted(race.ratio for race in self.races if race.ratio is not None)

    @property
    def geometric_mean(self) -> float | None:
        """Geometric mean of the ratios: 0 if a race failed, None without a ratio."""
        return _geometric_mean(self.ratios)

    @property
    def slowdowns(self) -> list[float]:
        """The slowdowns of all races that have one, in ascending order."""
        return sorted(race.slowdown for race in self.races if race.slowdown is not None)

    @property
    def regret(self) -> float | None:
        """How much longer our times are than a tune's, in the geometric mean: 0.05 is 5 %."""
        mean = _geometric_mean(self.slowdowns)
        return None if mean is None else mean - 1

    @property
    def low_percentile(self) -> float | None:
        """The 5th percentile of the ratios, or None without a ratio."""
        return percentile(self.ratios, LOW_SHARE)

    def with_race(self, race: RandomRace) -> RandomRaces:
        """These races and one more, in place of the one with its number if there is one."""
        others = (each for each in self.races if each.number != race.number)
        races = sorted((*others, race), key=lambda each: each.number)
        return replace(self, races=tuple(races))

    def to_json(self) -> dict[str, Any]:
        """All fields, ratios and what follows from the ratios."""
        races = [
            {**asdict(race), "ratio": race.ratio, "slowdown": race.slowdown} for race in self.races
        ]
        return {**vars(self), "races": races, "geometric_mean": self.geometric_mean,
                "low_percentile": self.low_percentile, "regret": self.regret}  # fmt: skip

    def write(self, path: Path) -> None:
        """Write a file in one step, in a new folder if need be."""
        shared = {name: value for name, value in vars(self).items() if name != "races"}
        headed_lines.write(path, shared, map(asdict, self.races))


def _geometric_mean(ordered: Sequence[float]) -> float | None:
    """The geometric mean of ascending values, 0 if one of them is, None without values."""
    if not ordered or not ordered[0]:
        return ordered[0] if ordered else None
    return math.exp(math.fsum(map(math.log, ordered)) / len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of ``ordered`` lies, or None without values.

    ``ordered`` is ascending. The value is interpolated between the two nearest values.
    """
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def checked_seed(seed: str) -> str:
    """``seed``, if it is the hash of a commit; else ``InvalidArgument``."""
    if not SEED.fullmatch(seed):
        raise InvalidArgument(
            f"seed {seed!r} is not the hash of a commit: give the 40 hex digits of git rev-parse "
            "HEAD"
        )
    return seed


def read(path: Path) -> RandomRaces:
    """The races in a file; ``InvalidArgument`` for a file of another form."""
    try:
        shared, races = headed_lines.read(path)
        return RandomRaces(**shared, races=tuple(RandomRace(**values) for values in races))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} has no random races: {error}") from error


def shipped(entry: str | None = None) -> list[RandomRaces]:
    """The races that come with the package, of one entry or of all.

    They are sorted by entry, GPU and date; an entry may have a file for each of several seeds.
    """
    found = map(read, (paths.data("tuning_db") / "random").glob("*.jsonl"))
    chosen = [races for races in found if entry in (None, races.entry)]
    return sorted(chosen, key=lambda races: (races.entry, races.gpu, races.created_at, races.seed))


def shipped_on(entry: str, gpu: str) -> list[RandomRace]:
    """The races on problems of ``entry`` that come with the package for the SKU ``gpu``."""
    return [race for races in shipped(entry) if races.gpu == gpu for race in races.races]
