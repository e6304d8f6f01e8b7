"""From what became of a candidate to a row of the database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelcat.bench.stats import median_interval
from kernelcat.catalog.digest import UNKNOWN
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime import telemetry
from kernelcat.store.measurement import STATUSES, Kind, Measurement, now
from kernelcat.store.races import SCREEN, SUSTAINED
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Failed, Timing
from kernelcat.verify.code_record import Case, are_equal


@dataclass(frozen=True)
class Predicted:
    """The candidate compiles and fits; ``median_us`` are the model's microseconds."""

    median_us: float


@dataclass(frozen=True)
class Writer:
    """Makes the rows of one tune, which have the fields of the writer in common."""

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
    ) -> Measurement:
        """The row that says what became of ``candidate``."""
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
            **self._outcome(outcome),
        )

    def _outcome(self, outcome: Timing | Predicted | Failed) -> dict[str, Any]:
        """The fields that tell what came out."""
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
            "max_error": finite(outcome.max_error),
            "sqnr_db": finite(outcome.sqnr_db),
        }  # fmt: skip


def _rounded(us: float) -> float:
    """To a tenth of a nanosecond, which no clock here resolves."""
    return round(us, 4)


def finite(value: float | None) -> float | None:
    """``value`` to four digits; None of what is not finite."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


@dataclass
class History:
    """What earlier runs know of one problem, for the kernels as they are now."""

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
        """``rows`` are oldest first; those of other code are as if they were not there.

        ``incumbents`` maps a regime and state to who won there before. Failures count in every
        regime, times in ``regime`` alone, and those of a hot chip where there are no others.
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
                history.failed[candidate] = row.status
            elif row.regime == regime and (row.state != SUSTAINED or candidate not in times):
                times[candidate] = row.median_us
        for candidate in history.failed:
            times.pop(candidate, None)
        history.incumbents = {race: c for race, c in incumbents.items() if c in times}
        return history
