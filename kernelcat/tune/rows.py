"""Rows of the database: written from outcomes, and read back as the history of a problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from kernelcat.bench.stats import median_interval, quantiles
from kernelcat.catalog.digest import UNKNOWN
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime import telemetry
from kernelcat.store.fields import MAX_QUANTILES
from kernelcat.store.measurement import STATUSES, Kind, Measurement, now
from kernelcat.store.plausibility import doubt
from kernelcat.store.races import SCREEN, SUSTAINED, newest_races
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Failed, Timing
from kernelcat.verify.code_record import Case, are_equal

if TYPE_CHECKING:
    from kernelcat.store import Store

DOUBTFUL = ("crashed", "timeout")
"""Verdicts that the machine, and not the kernel, may have caused."""
DOUBT_ENDS = timedelta(days=7)
"""Age after which a doubtful verdict counts no more, and the candidate is tried again."""


@dataclass(frozen=True)
class Predicted:
    """The candidate compiles and fits the GPU; ``median_us`` is the cost model's estimate."""

    median_us: float


@dataclass(frozen=True)
class Writer:
    """Makes the rows of one tune.

    ``digests`` has (language, variant) as keys.
    """

    entry: Entry
    gpu: str
    run: str
    environment: Mapping[str, Any]
    digests: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def row(
        self,
        problem: Problem,
        candidate: Candidate,
        outcome: Timing | Predicted | Failed,
        *,
        regime: str,
        l2: str = "cold",
        state: str = SCREEN,
        kind: Kind = "measured",
        winner: bool = False,
        seeds: Sequence[int] = (),
    ) -> Measurement:
        """The row with the outcome of ``candidate``; its environment has the ``seeds`` of its
        inputs."""
        fields = self._outcome(outcome)
        if seeds:
            fields["environment"] = {**fields["environment"], "seeds": list(seeds)}
        return Measurement(
            entry=self.entry.name,
            language=candidate.language,
            variant=candidate.variant,
            problem=problem.values,
            problem_name=self.entry.problem_name(problem),
            config=dict(candidate.config),
            source=self.digests.get((candidate.language, candidate.variant), ""),
            gpu=self.gpu,
            protocol={"regime": regime, "l2": l2, "state": state},
            run=self.run,
            kind=kind,
            created_at=now(),
            winner=winner,
            **fields,
        )

    def _outcome(self, outcome: Timing | Predicted | Failed) -> dict[str, Any]:
        """The fields of a row that depend on the outcome."""
        fields: dict[str, Any] = dict.fromkeys(
            ("median_us", "ci_us", "sm_clock_mhz", "power_w", "temperature_c", "max_error")
        )
        fields |= {"status": "passed", "samples": 0, "environment": self.environment}
        if isinstance(outcome, Failed):
            status = outcome.status if outcome.status in STATUSES else "launch_error"
            return fields | {"status": status, "detail": outcome.detail or None,
                             "max_error": finite(outcome.max_error)}  # fmt: skip
        if isinstance(outcome, Predicted):
            return fields | {"median_us": _rounded(outcome.median_us)}
        interval, chip = median_interval(outcome.samples), telemetry.summary(outcome.readings)
        throttle = chip.pop("throttle", None)
        if throttle:
            chip["environment"] = {**self.environment, "throttle": throttle}
        return fields | chip | {
            "median_us": _rounded(interval.median),
            "ci_us": (_rounded(interval.low), _rounded(interval.high)),
            "samples": len(outcome.samples),
            "quantiles_us": [_rounded(us) for us in quantiles(outcome.samples, MAX_QUANTILES)],
            "max_error": finite(outcome.max_error),
            "sqnr_db": finite(outcome.sqnr_db),
        }  # fmt: skip


def is_expired(row: Measurement) -> bool:
    """Whether ``row`` has a hang or a crash of long ago: a busy machine may have caused either."""
    age = datetime.now(UTC) - datetime.fromisoformat(row.created_at)
    return row.status in DOUBTFUL and age > DOUBT_ENDS


def _rounded(us: float) -> float:
    """Rounds to a tenth of a nanosecond, which is finer than the resolution of every timer used."""
    return round(us, 4)


def finite(value: float | None) -> float | None:
    """``value`` rounded to four digits; None for infinity, NaN and None."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


@dataclass
class History:
    """Results of earlier runs for one problem, as far as they hold for today's code.

    Attributes
    ----------
    failed : candidate -> status
    times : candidate -> microseconds of one run
    incumbents : (regime, state) -> winner of the last race
    """

    failed: dict[Candidate, str]
    times: dict[Candidate, float]
    incumbents: dict[tuple[str, str], Candidate]

    @staticmethod
    def of(
        rows: Sequence[Measurement],
        incumbents: Mapping[tuple[str, str], Candidate],
        digests: Mapping[tuple[str, str], str],
        regime: str,
    ) -> History:
        """The history from ``rows``, which are sorted from old to new.

        Rows that were measured with other code than today's are ignored. A failure in any regime
        counts. Times count only in ``regime``; a time from a hot chip counts only where the
        candidate has no other. ``incumbents`` without a time are dropped.
        """
        history = History({}, {}, {})
        times = history.times
        for row in rows:
            candidate = Candidate(row.language, row.variant, row.to_config())
            name = f"{row.entry}/{row.language}/{row.variant}"
            now = digests.get((row.language, row.variant), UNKNOWN)
            case = Case(row.to_problem(), candidate.config)
            if not are_equal(name, row.gpu, row.source, now, case):
                continue
            if row.median_us is None:
                if not is_expired(row):
                    history.failed[candidate] = row.status
                continue
            if history.failed.get(candidate) in DOUBTFUL:
                del history.failed[candidate]
            if row.regime == regime and (row.state != SUSTAINED or candidate not in times):
                times[candidate] = row.median_us
        for candidate in history.failed:
            times.pop(candidate, None)
        history.incumbents = {race: c for race, c in incumbents.items() if c in times}
        return history


@dataclass(frozen=True)
class Past:
    """What was measured for an entry on a GPU, shipped and local; no rows that cannot be true.

    Attributes
    ----------
    rows : problem (canonical JSON) -> its rows, shipped ones first, then from old to new
    races : problem -> the rows of its newest races
    """

    rows: Mapping[str, list[Measurement]]
    races: Mapping[str, list[Measurement]]

    @staticmethod
    def of(
        entry: str,
        gpu: str,
        store: Store,
        shipped: Sequence[Measurement],
        problem: Problem | None = None,
    ) -> Past:
        """The past of ``problem``, or of all problems; ``shipped`` has rows of ``tuning_db/``."""
        local = store.rows(entry=entry, gpu=gpu, problem=problem, kind="measured")
        races = store.winners(entry=entry, gpu=gpu, regime=None)
        raced = [row for race in races for row in race.measurements]
        return Past(
            _by_problem((*shipped, *local), problem), _by_problem((*shipped, *raced), problem)
        )

    def history(
        self, problem: Problem, digests: Mapping[tuple[str, str], str], regime: str
    ) -> History:
        """The history of ``problem``; arguments as for :meth:`History.of`."""
        incumbents = {}
        for race in newest_races(self.races.get(problem.key, ())):
            row = race.winner
            if race.key.kind == "measured" and race.key.state != SCREEN:
                incumbent = Candidate(row.language, row.variant, row.to_config())
                incumbents[race.key.regime, race.key.state] = incumbent
        return History.of(self.rows.get(problem.key, ()), incumbents, digests, regime)


def _by_problem(
    rows: Iterable[Measurement], problem: Problem | None
) -> dict[str, list[Measurement]]:
    """Problem -> its rows that can be true; of one problem only, unless ``problem`` is None."""
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if (problem is None or row.problem_key == problem.key) and doubt(row) is None:
            found.setdefault(row.problem_key, []).append(row)
    return found
