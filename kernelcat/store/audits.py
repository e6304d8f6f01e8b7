"""Audits: how good the choices of tunes are, measured against the whole legal space.

A file has one session of an entry on a GPU: JSON Lines, first what all problems share, then a line
for each problem. ``tuning_db/audit/`` has the files that come with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelcat import paths
from kernelcat.catalog.implementation import Config
from kernelcat.errors import InvalidArgument
from kernelcat.store import headed_lines


@dataclass(frozen=True)
class ScreenedTimes:
    """Times of an implementation's configurations in screening.

    Attributes
    ----------
    parameters : names of the configuration's parameters
    rows : the values of the parameters, and microseconds, a list for each configuration
    """

    parameters: list[str]
    rows: list[list[Any]]

    @staticmethod
    def of(times: Mapping[Config, float]) -> ScreenedTimes:
        """The table of ``times``: configurations of one implementation -> microseconds."""
        parameters = sorted({name for config in times for name in config})
        return ScreenedTimes(parameters, [
            [*(config[name] for name in parameters), round(us, 3)] for config, us in times.items()
        ])  # fmt: skip

    def times(self) -> dict[Config, float]:
        """Configuration -> microseconds."""
        return {
            Config(dict(zip(self.parameters, values, strict=True))): us for *values, us in self.rows
        }


@dataclass(frozen=True)
class AuditedTune:
    """A tune of one problem that knew no earlier result.

    Attributes
    ----------
    strategy : search strategy
    compiled : whether the kernels were compiled before the tune began
    screened : number of candidates that were tried
    seconds : time of the tune
    winner, config : implementation and configuration that the tune chose, or None
    us : median time of the choice in the last race, in microseconds; None where it failed there
    regret, regret_ci
        Time of the choice over that of the best in the last race, less 1, paired block by block,
        and the interval; 0.05 is 5 %.
    failed : why there is no regret, or None
    """

    strategy: str
    compiled: bool
    screened: int
    seconds: float
    winner: str | None = None
    config: Mapping[str, Any] | None = None
    us: float | None = None
    regret: float | None = None
    regret_ci: tuple[float, float] | None = None
    failed: str | None = None


@dataclass(frozen=True)
class AuditedProblem:
    """Tunes of one problem, and the race of their choices with the best of the whole space.

    Attributes
    ----------
    problem, problem_name : values of the axes, and the name if there is one
    num_legal : configurations that can serve the problem
    num_promising : those of them in which a tune searches
    screened : status -> number of legal configurations that were tried
    seconds : time to try the whole space
    best, best_config, best_us : the fastest of the last race
    flips
        Strategies whose two tunes chose configurations of different speed: the difference is
        neither within the noise nor below 1 %.
    tunes : two for each strategy
    skipped : why the problem could not be audited, or None
    times : implementation -> what its legal configurations took in screening
    """

    problem: Mapping[str, Any]
    problem_name: str | None
    num_legal: int
    num_promising: int
    screened: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    best: str | None = None
    best_config: Mapping[str, Any] | None = None
    best_us: float | None = None
    flips: Sequence[str] = ()
    tunes: tuple[AuditedTune, ...] = ()
    skipped: str | None = None
    times: Mapping[str, ScreenedTimes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        axes = ",".join(f"{axis}={value}" for axis, value in self.problem.items())
        return self.problem_name or axes


@dataclass(frozen=True)
class Audit:
    """One session of audits of an entry.

    Attributes
    ----------
    gpu : SKU
    trials : how many candidates a tune screened at most
    strategies : the strategies that were compared
    sources : implementation -> digest
    regime, state : how the races were run (``graph``, ``burst``)
    created_at : ISO 8601, UTC
    environment : the machine and its compilers (:class:`kernelcat.runtime.environment.Environment`)
    """

    entry: str
    gpu: str
    trials: int
    strategies: Sequence[str]
    sources: Mapping[str, str]
    regime: str
    state: str
    created_at: str
    environment: Mapping[str, Any]
    problems: tuple[AuditedProblem, ...] = ()

    def with_problem(self, problem: AuditedProblem) -> Audit:
        """This audit and one more problem."""
        return replace(self, problems=(*self.problems, problem))

    def regrets(self, strategy: str) -> list[float]:
        """The regrets of all tunes with a strategy, in ascending order."""
        tunes = (tune for problem in self.problems for tune in problem.tunes)
        found = (tune.regret for tune in tunes if tune.strategy == strategy)
        return sorted(regret for regret in found if regret is not None)

    def write(self, path: Path) -> None:
        """Write a file in one step, in a new folder if need be."""
        shared = {name: value for name, value in vars(self).items() if name != "problems"}
        headed_lines.write(path, shared, map(asdict, self.problems))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> Audit:
    """The audit in a file; ``InvalidArgument`` for a file of another form."""
    try:
        shared, records = headed_lines.read(path)
        return Audit(**shared, problems=tuple(map(_problem, records)))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"{path} has no audit: {error}") from error


def _problem(record: dict[str, Any]) -> AuditedProblem:
    times = {name: ScreenedTimes(**each) for name, each in record["times"].items()}
    return AuditedProblem(**{**record, "times": times, "tunes": tuple(map(_tune, record["tunes"]))})


def _tune(record: dict[str, Any]) -> AuditedTune:
    interval = record["regret_ci"]
    return AuditedTune(**{**record, "regret_ci": None if interval is None else tuple(interval)})


def shipped(entry: str | None = None) -> list[Audit]:
    """The audits that come with the package, of one entry or of all, by entry, GPU and date."""
    found = map(read, (paths.data("tuning_db") / "audit").glob("*.jsonl"))
    chosen = [audit for audit in found if entry in (None, audit.entry)]
    return sorted(chosen, key=lambda audit: (audit.entry, audit.gpu, audit.created_at))
