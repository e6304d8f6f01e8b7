"""Cross-tuning, for a GPU that is not in this machine.

Candidates are compiled, and those that fit the GPU are ranked by the cost model. Nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import MissingDependency
from kernelcat.jit import cache
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import newest_races
from kernelcat.tune import backend as backends
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.compiler import numbers
from kernelcat.tune.cross_plan import LOOK_AHEAD, Code, Outcome, Plan, Turn
from kernelcat.tune.messages import SKIPPED, Built, Failed
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Line
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Predicted, Writer

if TYPE_CHECKING:
    from kernelcat.store import Store

NUM_FITTING, MAX_FITTING = 4, 9
"""Configurations of an implementation that must compile and fit for a problem, without a budget and
with one."""
DEFAULT_BUDGET_S = 114.0
"""Seconds after which nothing more is compiled where no budget is given."""
MAX_SPILL_BYTES = 256
"""Bytes of spilled registers a thread up to which a kernel is ranked. On the H200 the fastest
configurations of `flashmla` in Triton spill 156 and 236 bytes."""
SLOW_SPILL_BYTES = 1200
"""Spilled bytes a thread that double the time: of those two, the first takes an eighth longer than
one that spills nothing, measured by their estimates."""


def cross_tune(
    entry: Entry, gpu: Gpu, implementations: Sequence[Implementation], problems: Sequence[Problem],
    *, pool: CompilePool, store: Store, writer: Writer, progress: Line, report: TuneReport,
    start: float, budget_s: float | None,
) -> None:  # fmt: skip
    """Adds predictions for ``gpu`` to ``report`` and ``store``.

    Nothing more is compiled ``budget_s`` seconds after ``start`` (``time.monotonic``). None stands
    for :data:`DEFAULT_BUDGET_S`, and for fewer configurations than a budget buys.
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
    goal = NUM_FITTING if budget_s is None else MAX_FITTING
    end = start + (DEFAULT_BUDGET_S if budget_s is None else budget_s)
    predictions = {
        problem: Prediction(entry, gpu, implementations, problem, writer) for problem in problems
    }
    for problem, prediction in predictions.items():
        prediction.go_on_from(
            store.rows(entry=entry.name, gpu=gpu.sku, problem=problem, kind="predicted")
        )
    report.problems += [prediction.report for prediction in predictions.values()]
    turns = [turn for prediction in predictions.values() for turn in prediction.turns]
    planned = sum(min(goal, len(turn.candidates)) for turn in turns)
    if len(problems) == 1:
        progress.problem(next(iter(predictions.values())).report.name, planned)
    else:
        progress.problems(len(problems), planned)

    unsaved: list[Measurement] = []

    def save() -> None:
        if unsaved:  # one transaction for all candidates of a kernel
            store.keep(unsaved)
            report.rows += unsaved
            unsaved.clear()

    def judge(turn: Turn, candidate: Candidate, built: Outcome) -> float | None:
        prediction = predictions[turn.problem]
        reason = why_left_out(built, gpu)
        if reason is not None:
            report.note(f"{candidate} was left out: {reason}")
            prediction.left_out += 1
            return None
        row = prediction.judge(candidate, built)
        if row is not None:
            unsaved.append(row)
        status = built.status if isinstance(built, Failed) else "passed"
        progress.tried(candidate, status, min(prediction.fitting.values(), default=None))
        return prediction.fitting.get(candidate)

    codes = _Codes(gpu, pool.spec)
    plan = Plan(entry, turns, codes.code, codes.ready, judge)
    try:
        _compile(plan, goal, end, pool, save)
    finally:
        save()
    for prediction in predictions.values():
        prediction.finish(goal)
        progress.finished(prediction.report)
    report.notes += _undone(plan, turns, goal, budget_s, entry.name, gpu)


def _compile(
    plan: Plan, goal: int, end: float, pool: CompilePool, save: Callable[[], None]
) -> None:
    """Compiles until ``goal`` candidates of each turn fit, nothing is left, or the time is up.

    ``save`` is called after each kernel.
    """
    while True:
        before = plan.compiled
        for problem, candidate, built in pool.build_each(_until(end, plan.jobs(goal))):
            plan.took(problem, candidate, built)
            save()
            if time.monotonic() > end:
                return
        if plan.compiled == before:
            return


def _until(
    end: float, jobs: Iterator[tuple[Problem, Candidate]]
) -> Iterator[tuple[Problem, Candidate]]:
    """The jobs that begin before ``end``; the first one in any case."""
    for number, job in enumerate(jobs):
        if number and time.monotonic() > end:
            return
        yield job


def _undone(
    plan: Plan, turns: Sequence[Turn], goal: int, budget_s: float | None, name: str, gpu: Gpu
) -> list[str]:
    """What the tune did not do, in sentences."""
    short = [turn for turn in turns if turn.fitting < goal]
    late = [turn for turn in short if not turn.is_over]
    small = [turn for turn in short if turn.is_over and turn.fitting == len(turn.candidates)]
    notes = [f"{plan.compiled} kernels were compiled, the others come from the cache"]
    if late:
        notes.append(
            f"the time ended before {len(late)} of {len(turns)} pairs of an implementation and a "
            f"problem had {goal} configurations that compile and fit: run the command again, or "
            "give a larger --budget"
        )
    if small:
        counts = sorted({len(turn.candidates) for turn in small})
        notes.append(
            f"{len(small)} of {len(turns)} pairs have only {' or '.join(map(str, counts))} "
            f"{'configuration' if counts == [1] else 'configurations'} worth a try, and all of "
            "them compile and fit"
        )
    if rest := len(short) - len(late) - len(small):
        notes.append(
            f"{rest} of {len(turns)} pairs have fewer than {goal} configurations that compile and "
            f"fit among the {LOOK_AHEAD} with the least estimates: all of these were tried"
        )
    if budget_s is None:
        notes.append(
            f"{goal} configurations of each implementation are compiled for a problem: kernelcat "
            f"tune {name} --gpu {gpu.sku} --budget 1h compiles {MAX_FITTING}"
        )
    return notes


class _Codes:
    """What candidates are compiled from, and what the cache already has of it.

    A stand-in backend has no sources: it compiles each candidate on its own.
    """

    def __init__(self, gpu: Gpu, spec: str) -> None:
        self.gpu, self.is_real = gpu, spec == backends.CUDA
        self._codes: dict[tuple[str, Problem, Candidate], Code] = {}
        self._absent: set[Code] = set()

    def code(self, turn: Turn, candidate: Candidate) -> Code:
        key = turn.implementation.name, turn.problem, candidate
        if key not in self._codes:
            self._codes[key] = self._code(turn, candidate)
        return self._codes[key]

    def _code(self, turn: Turn, candidate: Candidate) -> Code:
        if not self.is_real:
            return turn.problem.key, candidate.key
        steps = turn.implementation.program(turn.problem, candidate.config, self.gpu).steps
        shared = (str(step.shared_bytes) for step in steps)
        return (*(step.source.digest() for step in steps), *shared)

    def ready(self, turn: Turn, candidate: Candidate) -> Outcome | None:
        """The outcome for a candidate whose kernels are all in the cache."""
        code = self.code(turn, candidate)
        if not self.is_real or code in self._absent:
            return None
        built = []
        for step in turn.implementation.program(turn.problem, candidate.config, self.gpu).steps:
            try:
                artifact = cache.find(step.source, self.gpu.arch)
            except MissingDependency:  # the child says so, with the line that installs it
                artifact = None
            if artifact is None:
                self._absent.add(code)
                return None
            dynamic = {"shared_bytes": step.shared_bytes} if step.shared_bytes else {}
            built.append(numbers({**artifact.metadata, **dynamic}))
        return Built(tuple(built))


class Prediction:
    """The prediction for one problem: the candidates with their estimates, and the report."""

    def __init__(
        self, entry: Entry, gpu: Gpu, implementations: Sequence[Implementation],
        problem: Problem, writer: Writer,
    ) -> None:  # fmt: skip
        self.gpu, self.problem, self.writer = gpu, problem, writer
        self.report = ProblemReport(entry.problem_name(problem) or str(problem))
        turns = [Turn(problem, i, list(promising_candidates(i, problem, gpu)))
                 for i in implementations]  # fmt: skip
        self.turns = [turn for turn in turns if turn.candidates]
        self.estimates = dict(pair for turn in turns for pair in turn.candidates)
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
            slower = 1 + spilled(built) / SLOW_SPILL_BYTES
            self.fitting[candidate] = self.estimates[candidate] * slower
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

    def finish(self, goal: int) -> None:
        """Adds the winner, or why there is none, to the report.

        The winner is the row that the leaderboard and calls choose from the same rows.
        """
        short = [turn for turn in self.turns if turn.fitting < goal]
        self.report.not_tried = sum(
            min(goal - turn.fitting, len(turn.left) + len(turn.waiting)) for turn in short
        )
        self.report.cut_short = self.report.not_tried > 0
        if not self.fitting:
            self.report.skipped = self._why_none(self.report.tried.total() + self.left_out)
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
    configs |= dict.fromkeys(search.by_estimate(implementation, problem, gpu)[:LOOK_AHEAD])
    for config in configs:
        if config is not None:
            estimate = implementation.estimate(problem, config, gpu)
            yield Candidate.of(implementation, config), estimate


def why_left_out(built: Built | Failed, gpu: Gpu) -> str | None:
    """Why a candidate is not judged: it was not compiled here, or :func:`misfit`; else None."""
    if isinstance(built, Failed):
        return built.detail if built.status == SKIPPED else None
    return misfit(built, gpu)


def spilled(built: Built) -> int:
    """Bytes of registers that a thread spills, of the kernel that spills most."""
    return max((int(step.get("spill_bytes", 0)) for step in built.steps), default=0)


def misfit(built: Built, gpu: Gpu) -> str | None:
    """Why compiled code is not ranked for ``gpu`` (it spills much, or does not fit); else None.

    Such code is no failure of the compiler, and is not stored as one.
    """
    if spilled(built) > MAX_SPILL_BYTES:
        return f"spills {spilled(built)} bytes of registers a thread"
    for step in built.steps:
        shared = step.get("static_shared_bytes", 0) + step.get("shared_bytes", 0)
        if shared > gpu.shared_bytes:
            return (
                f"needs {shared} bytes of shared memory, {gpu.sku} has {gpu.shared_bytes} a block"
            )
    return None
