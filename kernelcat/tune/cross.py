"""Cross-tuning, for a GPU that is not in this machine.

Candidates are compiled, and those that fit the GPU are ranked by the cost model. Nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import newest_races
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import SKIPPED, Built, Failed
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Line
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Predicted, Writer

if TYPE_CHECKING:
    from kernelcat.store import Store

MAX_COMPILED = 8
"""Configurations with the smallest estimate that are compiled for an implementation and problem."""

MAX_SPILL_BYTES = 32
"""Bytes of spilled registers a thread up to which the estimate of a kernel is trusted."""


def cross_tune(
    entry: Entry, gpu: Gpu, implementations: Sequence[Implementation], problems: Sequence[Problem],
    *, pool: CompilePool, store: Store, writer: Writer, progress: Line, report: TuneReport,
    deadline: float,
) -> None:  # fmt: skip
    """Adds predictions for ``gpu`` to ``report`` and ``store``.

    The work on the last problem ends at ``deadline`` (``time.monotonic``).
    """
    report.notes.append(
        f"nothing ran: there is no {gpu.name} in this machine. These configurations compile and "
        "fit, and are ranked by a cost model"
    )
    report.notes.append(
        f"to measure, run kernelcat tune {entry.name} on a machine with {gpu.name}, or use a Ray "
        f"cluster that has such machines: kernelcat tune {entry.name} --gpu {gpu.sku} "
        "--executor ray --address HOST:6379"
    )
    for number, problem in enumerate(problems):
        now = time.monotonic()
        end = now + (deadline - now) / (
            len(problems) - number
        )  # equal shares of the remaining time
        prediction = Prediction(entry, gpu, implementations, problem, writer)
        prediction.go_on_from(
            store.rows(entry=entry.name, gpu=gpu.sku, problem=problem, kind="predicted")
        )
        report.problems.append(prediction.report)
        progress.problem(prediction.report.name, len(prediction.estimates))
        for candidate, built in pool.build(problem, prediction.estimates):
            if time.monotonic() > end:
                prediction.report.cut_short = True
                break
            reason = why_left_out(built, gpu)
            if reason is not None:
                report.note(f"{candidate} was left out: {reason}")
                prediction.left_out += 1
                continue
            row = prediction.judge(candidate, built)
            if row is not None:
                store.keep([row])
                report.rows.append(row)
            status = built.status if isinstance(built, Failed) else "passed"
            progress.tried(candidate, status, min(prediction.fitting.values(), default=None))
        prediction.finish()
        progress.finished(prediction.report)


class Prediction:
    """The prediction for one problem: the candidates with their estimates, and the report."""

    def __init__(
        self, entry: Entry, gpu: Gpu, implementations: Sequence[Implementation],
        problem: Problem, writer: Writer,
    ) -> None:  # fmt: skip
        self.gpu, self.problem, self.writer = gpu, problem, writer
        self.report = ProblemReport(entry.problem_name(problem) or str(problem))
        queues = [promising_candidates(i, problem, gpu) for i in implementations]
        # Implementations take turns, so that an early end of the budget is fair to all.
        turns = zip_longest(*queues)
        self.estimates = dict(pair for turn in turns for pair in turn if pair)
        self.fitting: dict[Candidate, float] = {}  # microseconds, by the cost model
        self.left_out = 0
        self.rows: dict[Candidate, Measurement] = {}  # of this run, and of the run it goes on from

    def go_on_from(self, rows: Sequence[Measurement]) -> None:
        """Makes this prediction a part of the newest of earlier runs, unless a kernel changed.

        What is stored already is then not stored again, and the rows of an interrupted run and of
        this run are ranked together. ``rows`` are the predictions for the problem, oldest first.
        """
        newest = [row for row in rows if row.run == rows[-1].run]
        earlier = {Candidate(r.language, r.variant, r.to_config()): r for r in newest}
        digests = self.writer.digests
        if earlier and all(
            candidate in self.estimates
            and row.source == digests.get((row.language, row.variant), "")
            for candidate, row in earlier.items()
        ):
            self.rows, self.writer = earlier, replace(self.writer, run=newest[-1].run)

    def judge(self, candidate: Candidate, built: Built | Failed) -> Measurement | None:
        """The row of a candidate: predicted, or failed with the reason; None if it is known."""
        outcome: Failed | Predicted
        if isinstance(built, Failed):
            outcome = built
        else:
            self.fitting[candidate] = self.estimates[candidate]
            outcome = Predicted(self.fitting[candidate])
        row = self.writer.row(
            self.problem, candidate, outcome, regime="graph", state="predicted", kind="predicted"
        )
        self.report.tried[row.status] += 1
        known = self.rows.get(candidate)
        if known and (known.status, known.median_us) == (row.status, row.median_us):
            self.report.known += 1
            return None
        self.rows[candidate] = row
        return row

    def finish(self) -> None:
        """Adds the winner, or why there is none, to the report.

        The winner is the row that the leaderboard and calls choose from the same rows.
        """
        num_tried = self.report.tried.total() + self.left_out
        self.report.not_tried = len(self.estimates) - num_tried
        if not self.fitting:
            self.report.skipped = self._why_none(num_tried)
            return
        [race] = newest_races(self.rows.values())
        best = race.winner
        assert best.median_us is not None
        self.report.winners["graph", "predicted"] = Winner(
            Candidate(best.language, best.variant, best.to_config()), best.median_us, None,
            "predicted by the cost model; nothing ran",
        )  # fmt: skip

    def _why_none(self, num_tried: int) -> str:
        if not self.estimates:
            return f"no implementation serves this problem on {self.gpu.sku}"
        if not num_tried:
            return "the budget ended before anything was compiled: give a larger --budget"
        if self.report.not_tried:
            return (f"none of the {num_tried} configurations that were tried compiles and fits on "
                    f"{self.gpu.sku}: give a larger --budget")  # fmt: skip
        return f"nothing compiles and fits on {self.gpu.sku}"


def promising_candidates(
    implementation: Implementation, problem: Problem, gpu: Gpu
) -> Iterator[tuple[Candidate, float]]:
    """The default and the configurations with the smallest estimates (microseconds)."""
    configs = {search.default(implementation, problem, gpu): None}
    configs |= dict.fromkeys(search.by_estimate(implementation, problem, gpu)[:MAX_COMPILED])
    for config in configs:
        if config is not None:
            estimate = implementation.estimate(problem, config, gpu)
            yield Candidate.of(implementation, config), estimate


def why_left_out(built: Built | Failed, gpu: Gpu) -> str | None:
    """Why a candidate is not judged: it was not compiled here, or :func:`misfit`; else None."""
    if isinstance(built, Failed):
        return built.detail if built.status == SKIPPED else None
    return misfit(built, gpu)


def misfit(built: Built, gpu: Gpu) -> str | None:
    """Why compiled code is not ranked for ``gpu`` (it spills much, or does not fit); else None.

    Such code is no failure of the compiler, and is not stored as one.
    """
    for step in built.steps:
        spilled = step.get("spill_bytes", 0)
        if spilled > MAX_SPILL_BYTES:
            return f"spills {spilled} bytes of registers a thread"
        shared = step.get("static_shared_bytes", 0) + step.get("shared_bytes", 0)
        if shared > gpu.shared_bytes:
            return (
                f"needs {shared} bytes of shared memory, {gpu.sku} has {gpu.shared_bytes} a block"
            )
    return None
