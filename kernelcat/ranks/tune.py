"""Tunes of entries of several ranks: races whose rows are stored, problem by problem."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kernelcat import catalog
from kernelcat.bench.stats import decide, median_interval
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import RankFailed
from kernelcat.ranks import race
from kernelcat.ranks.race import Raced
from kernelcat.runtime import gpu as gpus
from kernelcat.store import Store, lines
from kernelcat.store.measurement import Measurement, new_run
from kernelcat.store.races import BURST
from kernelcat.tune.candidate import Candidate, simplicity
from kernelcat.tune.messages import Failed, Timing
from kernelcat.tune.problem import best_peer
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Past, Writer

REGIME, L2 = "graph", "warm"
"""Races time CUDA graphs, on inputs that stay where they are."""


def tune(
    entry: Entry,
    implementations: Sequence[Implementation],
    problems: Sequence[Problem],
    numbers: Sequence[int],
    store: Store,
    budget_s: float | None = None,
    peers: bool = True,
) -> TuneReport:
    """Race every configuration of ``implementations`` on the GPUs ``numbers``, and store rows.

    Rows have the GPUs' common name (``h200x2-nvlink``). A problem that would begin after
    ``budget_s`` seconds is skipped, and so is one whose ranks fail.
    """
    start, report = time.monotonic(), TuneReport(entry.name, "", "measured", new_run())
    for problem in problems:
        result = report.begun(ProblemReport(entry.problem_name(problem) or str(problem)))
        if budget_s is not None and time.monotonic() - start > budget_s:
            result.skipped = "the budget ended before"
            continue
        try:
            raced = race.run(implementations, problem, numbers, peers)
        except RankFailed as error:
            result.skipped = str(error)
            continue
        report.gpu = raced.environment["sku"]
        if raced.left_out:
            report.note(raced.left_out)
        for candidate, why in raced.failed.items():
            if why.status in (race.CRASHED, race.TIMEOUT):
                report.note(f"{candidate} was left out of {result.name}: {why.detail}")
        rows = _rows(raced, report.run, _decide(raced, implementations, result, store))
        store.keep(rows)
        report.rows += rows
    report.duration_s = time.monotonic() - start
    return report


def _decide(
    raced: Raced, implementations: Sequence[Implementation], result: ProblemReport, store: Store
) -> Candidate | None:
    """The winner of a race, which goes into ``result``; None where nothing was right."""
    result.skipped_peers = {c.variant: why.detail for c, why in raced.failed.items() if c.is_peer}
    result.tried.update(why.status for c, why in raced.failed.items() if not c.is_peer)
    samples = {c: timing.samples for c, timing in raced.times.items() if not c.is_peer}
    if not samples:
        result.skipped = "no configuration was right on all ranks"
        return None
    problem, machine = raced.problem, gpus.find(raced.environment["sku"])
    order = partial(
        simplicity,
        ranks={(i.language, i.variant): i.rank for i in implementations},
        defaults={(i.language, i.variant): i.default(problem, machine) for i in implementations},
    )
    past = Past.of(problem.entry, machine.sku, store, _shipped(problem.entry, machine.sku), problem)
    history = past.history(problem, _digests(problem.entry), REGIME)
    decision = decide(samples, order, history.incumbents.get((REGIME, BURST)))
    interval = median_interval(samples[decision.winner])
    result.winners[REGIME, BURST] = Winner(
        decision.winner, interval.median, (interval.low, interval.high), decision.reason,
        len(decision.tied), *best_peer(raced.times, decision.winner),
    )  # fmt: skip
    return decision.winner


def _rows(raced: Raced, run: str, winner: Candidate | None) -> list[Measurement]:
    """The rows of a race, those of wrong configurations too."""
    problem, machine = raced.problem, raced.environment["sku"]
    entry = catalog.entry(problem.entry)
    writer = Writer(entry, machine, run, raced.environment, _digests(entry.name))
    ours = {c: why for c, why in raced.failed.items() if not c.is_peer}
    outcomes: dict[Candidate, Timing | Failed] = {**raced.times, **ours}
    return [
        writer.row(problem, each, outcome, regime=REGIME, l2=L2, state=BURST, winner=each == winner)
        for each, outcome in outcomes.items()
    ]


def _digests(entry: str) -> dict[tuple[str, str], str]:
    """Language and variant -> digest, of all implementations."""
    return {(i.language, i.variant): digest(i) for i in catalog.implementations(entry)}


def _shipped(entry: str, machine: str) -> list[Measurement]:
    """Our rows of ``tuning_db/`` for ``entry`` on the GPUs with this common name."""
    rows = (row for row in lines.shipped() if (row.entry, row.gpu) == (entry, machine))
    return [row for row in rows if not row.is_peer]
