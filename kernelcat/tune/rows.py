"""From a worker's reply to a row of the database."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelcat.bench.stats import median_interval
from kernelcat.catalog.digest import UNKNOWN
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime import telemetry
from kernelcat.store.measurement import STATUSES, Measurement, now
from kernelcat.store.races import SCREEN, SUSTAINED, WINNER
from kernelcat.tune.candidate import Candidate
from kernelcat.verify.code_record import Case, are_equal


@dataclass(frozen=True)
class Writer:
    """Makes the rows of one tune: what they all share is said once."""

    entry: Entry
    gpu: str
    run: str
    environment: Mapping[str, Any]
    digests: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def row(
        self,
        problem: Problem,
        candidate: Candidate,
        reply: Mapping[str, Any],
        *,
        regime: str,
        l2: str = "cold",
        state: str = SCREEN,
        winner: bool = False,
        kind: Any = "measured",
    ) -> Measurement:
        """The row for ``reply`` (``status``, ``detail``, ``samples``, ``readings``)."""
        status: Any = reply["status"] if reply["status"] in STATUSES else "launch_error"
        passed = status == "passed"
        interval = median_interval(reply["samples"]) if passed and reply.get("samples") else None
        median = interval.median if interval else reply.get("median_us")
        readings = [telemetry.Reading.of(r) for r in reply.get("readings", ())]
        chip = telemetry.summary(readings)
        throttle = {"throttle": chip["throttle"]} if chip.get("throttle") else {}
        return Measurement(
            entry=self.entry.name,
            language=candidate.language,
            variant=candidate.variant,
            problem=problem.values,
            problem_name=self.entry.problem_name(problem),
            config=dict(candidate.config),
            source=self.digests.get((candidate.language, candidate.variant), ""),
            gpu=self.gpu,
            environment={**self.environment, **throttle},
            protocol={"regime": regime, "l2": l2, "state": state},
            run=self.run,
            kind=kind,
            status=status,
            median_us=_rounded(median) if passed and median is not None else None,
            ci_us=(_rounded(interval.low), _rounded(interval.high)) if interval else None,
            samples=len(reply.get("samples", ())) if interval else 0,
            sm_clock_mhz=chip.get("sm_clock_mhz"),
            power_w=chip.get("power_w"),
            temperature_c=chip.get("temperature_c"),
            max_error=finite(reply.get("max_error")),
            sqnr_db=finite(reply.get("sqnr_db")),
            created_at=now(),
            detail=WINNER if winner else reply.get("detail") or None,
        )


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
