"""Tuning for a GPU that is not here: compile, prune and rank. Nothing runs, nothing is measured."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.measurement import Measurement
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import SKIPPED, Built, Failed
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Line
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Predicted, Writer

if TYPE_CHECKING:
    from kernelcat.store import Store

COMPILED = 8
"""Configurations compiled for each implementation and problem: the best by the model."""


def cross_tune(
    entry: Entry, gpu: Gpu, implementations: Sequence[Implementation], problems: Sequence[Problem],
    *, pool: CompilePool, store: Store, writer: Writer, progress: Line, report: TuneReport,
    deadline: float,
) -> None:  # fmt: skip
    """Fill ``report`` and the store with predictions for ``gpu``."""
    report.notes.append(
        f"nothing ran: there is no {gpu.name} in this machine. These configurations compile and "
        "fit, and are ranked by a model of the chip"
    )
    report.notes.append(
        f"to measure, run kernelcat tune {entry.name} on a machine with one, or submit "
        "that command to a Ray cluster that has one: ray job submit --entrypoint-num-gpus 1 -- "
        f"kernelcat tune {entry.name}"
    )
    for number, problem in enumerate(problems):
        now = time.monotonic()
        end = now + (deadline - now) / (len(problems) - number)  # equal shares of what is left
        predicting = Prediction(entry, gpu, implementations, problem, writer)
        report.problems.append(predicting.report)
        progress.problem(predicting.report.name, len(predicting.estimates))
        for candidate, built in pool.build(problem, predicting.estimates):
            if time.monotonic() > end:
                predicting.report.cut_short = True
                break
            if isinstance(built, Failed) and built.status == SKIPPED:
                report.note(f"{candidate} was left out: {built.detail}")
                continue
            row = predicting.judge(candidate, built)
            store.keep([row])
            report.rows.append(row)
            progress.tried(candidate, row.status, row.median_us)
        predicting.finish()


class Prediction:
    """One problem: the candidates with their estimates, and what became of them."""

    def __init__(
        self, entry: Entry, gpu: Gpu, implementations: Sequence[Implementation],
        problem: Problem, writer: Writer,
    ) -> None:  # fmt: skip
        self.gpu, self.problem, self.writer = gpu, problem, writer
        self.report = ProblemReport(entry.problem_name(problem) or str(problem), Counter())
        queues = [promising(i, problem, gpu) for i in implementations]
        turns = zip_longest(*queues)  # by turns: a budget that ends was fair to each
        self.estimates = dict(pair for turn in turns for pair in turn if pair)
        self.passed: dict[Candidate, float] = {}

    def judge(self, candidate: Candidate, built: Built | Failed) -> Measurement:
        """The row for one candidate: predicted, or rejected with the reason."""
        outcome = built if isinstance(built, Failed) else self._fits(candidate, built)
        row = self.writer.row(
            self.problem, candidate, outcome, regime="graph", state="predicted", kind="predicted"
        )
        self.report.tried[row.status] += 1
        return row

    def _fits(self, candidate: Candidate, built: Built) -> Predicted | Failed:
        reason = misfit(built, self.gpu)
        if reason:
            return Failed("compile_error", reason)
        self.passed[candidate] = self.estimates[candidate]
        return Predicted(self.passed[candidate])

    def finish(self) -> None:
        if not self.passed:
            self.report.skipped = (
                "the time was up before anything was compiled: give it a larger --budget"
                if self.report.cut_short
                else f"nothing compiles and fits on {self.gpu.sku}"
            )
            return
        best = min(self.passed, key=lambda c: (self.passed[c], c.key))
        self.report.winners["graph", "predicted"] = Winner(
            best, self.passed[best], None, "predicted by the model; nothing ran"
        )


def promising(
    implementation: Implementation, problem: Problem, gpu: Gpu
) -> Iterator[tuple[Candidate, float]]:
    """The default and the best few configurations by the model, with their microseconds."""
    chosen = {search.default(implementation, problem, gpu): None}
    chosen |= dict.fromkeys(search.by_estimate(implementation, problem, gpu)[:COMPILED])
    for config in chosen:
        if config is not None:
            estimate = implementation.estimate(problem, config, gpu)
            yield Candidate.of(implementation, config), estimate


def misfit(built: Built, gpu: Gpu) -> str | None:
    """Why compiled code should not run on ``gpu``; None when it may."""
    for step in built.steps:
        spilled = step.get("spill_bytes", 0)
        if spilled:
            return f"spills {spilled} bytes of registers a thread"
        shared = step.get("static_shared_bytes", 0) + step.get("shared_bytes", 0)
        if shared > gpu.shared_bytes:
            return (
                f"needs {shared} bytes of shared memory, {gpu.sku} has {gpu.shared_bytes} a block"
            )
    return None
