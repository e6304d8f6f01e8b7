"""Cross-tuning, for a GPU that is not in this machine.

Candidates are compiled, and those that fit the GPU are ranked by the cost model. Nothing runs.
"""

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

MAX_COMPILED = 8
"""Configurations with the smallest estimate that are compiled for an implementation and problem."""


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
        f"to measure, run kernelcat tune {entry.name} on a machine with {gpu.name}, or on a Ray "
        "cluster that has such machines: ray job submit --entrypoint-num-gpus 1 -- "
        f"kernelcat tune {entry.name}"
    )
    for number, problem in enumerate(problems):
        now = time.monotonic()
        end = now + (deadline - now) / (
            len(problems) - number
        )  # equal shares of the remaining time
        prediction = Prediction(entry, gpu, implementations, problem, writer)
        report.problems.append(prediction.report)
        progress.problem(prediction.report.name, len(prediction.estimates))
        for candidate, built in pool.build(problem, prediction.estimates):
            if time.monotonic() > end:
                prediction.report.cut_short = True
                break
            if isinstance(built, Failed) and built.status == SKIPPED:
                report.note(f"{candidate} was left out: {built.detail}")
                continue
            row = prediction.judge(candidate, built)
            store.keep([row])
            report.rows.append(row)
            progress.tried(candidate, row.status, row.median_us)
        prediction.finish()


class Prediction:
    """The prediction for one problem: the candidates with their estimates, and the report."""

    def __init__(
        self, entry: Entry, gpu: Gpu, implementations: Sequence[Implementation],
        problem: Problem, writer: Writer,
    ) -> None:  # fmt: skip
        self.gpu, self.problem, self.writer = gpu, problem, writer
        self.report = ProblemReport(entry.problem_name(problem) or str(problem), Counter())
        queues = [promising_candidates(i, problem, gpu) for i in implementations]
        # Implementations take turns, so that an early end of the budget is fair to all.
        turns = zip_longest(*queues)
        self.estimates = dict(pair for turn in turns for pair in turn if pair)
        self.fitting: dict[Candidate, float] = {}  # microseconds, by the cost model

    def judge(self, candidate: Candidate, built: Built | Failed) -> Measurement:
        """The row of one candidate: predicted, or failed with the reason."""
        outcome = built if isinstance(built, Failed) else self._predict(candidate, built)
        row = self.writer.row(
            self.problem, candidate, outcome, regime="graph", state="predicted", kind="predicted"
        )
        self.report.tried[row.status] += 1
        return row

    def _predict(self, candidate: Candidate, built: Built) -> Predicted | Failed:
        reason = misfit(built, self.gpu)
        if reason:
            return Failed("compile_error", reason)
        self.fitting[candidate] = self.estimates[candidate]
        return Predicted(self.fitting[candidate])

    def finish(self) -> None:
        """Adds the winner, or why there is none, to the report."""
        if not self.fitting:
            self.report.skipped = (
                "the budget was used up before anything was compiled: give a larger --budget"
                if self.report.cut_short
                else f"nothing compiles and fits on {self.gpu.sku}"
            )
            return
        best = min(self.fitting, key=lambda c: (self.fitting[c], c.key))
        self.report.winners["graph", "predicted"] = Winner(
            best, self.fitting[best], None, "predicted by the cost model; nothing ran"
        )


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


def misfit(built: Built, gpu: Gpu) -> str | None:
    """Why compiled code is not used on ``gpu`` (spills, shared memory); None if it is."""
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
