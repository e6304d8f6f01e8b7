"""Tuning a workload: of the problems that programs called, those that cost most come first.

Problems are tuned one after the other, each by a tune of its own, so a workload may name many
entries, and a tune that was stopped goes on where it ended: what is measured is not tuned again.
"""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcat.call.calibrated import Prediction, predictions
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, UnknownName, Unsupported
from kernelcat.report.calibration import REGIME
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import calibration, workload
from kernelcat.store.workload import Use
from kernelcat.tune import backends, shipped_rows, tune
from kernelcat.tune.executor import choose_target
from kernelcat.tune.options import LOCAL, Options
from kernelcat.tune.report import Interrupted, TuneReport, WorkloadReport
from kernelcat.tune.rows import Past

if TYPE_CHECKING:
    from kernelcat.store import Store

MIN_SHARE_S = 30.0
"""Seconds of the budget that a problem gets at least, as far as there are so many."""


@dataclass(frozen=True)
class Job:
    """A problem of a workload, and the device time that it cost in microseconds."""

    entry: Entry
    problem: Problem
    cost_us: float

    @property
    def name(self) -> str:
        """``gemm 4096x4096x4096``, or the axes of a problem without a name."""
        return f"{self.entry.name} {self.entry.problem_name(self.problem) or self.problem}"


def tune_workload(
    path: Path,
    entry: str | None = None,
    *,
    replays: int = 1,
    budget_s: float | None = None,
    done: Callable[[TuneReport], None] = lambda report: None,
    **options: Any,
) -> WorkloadReport:
    """Tunes the problems of the workload in ``path``, those that cost most first.

    Cost is the number of calls times the device time of one call. Left out are problems that were
    measured with today's code in all thermal states asked for, and calls of a pinned configuration.
    A problem is tuned again if the calibrated model expects more of a kernel that was not measured
    for it than of all that were, as where a kernel is newer than the problem's race.

    Parameters
    ----------
    entry : only the problems of this entry
    replays : how often a call counts that a CUDA graph captured
    budget_s
        Seconds for all problems; None is no limit. A problem gets the part of the time that its
        cost is of the remaining problems' cost, and at least :data:`MIN_SHARE_S`.
    done : called with the report of each problem
    options : as for :func:`kernelcat.tune.tune`, but for ``problems`` and several GPUs

    Raises
    ------
    StoreError
        The file cannot be read, or is no workload.
    InvalidArgument
        The options name several GPUs.
    Interrupted
        Ctrl-C, with the report so far.
    """
    from kernelcat.store import Store

    asked = Options(**options)
    if asked.devices == "all" or len(asked.devices or ()) > 1:
        raise InvalidArgument("a workload is tuned on one GPU: name one --device")
    if asked.executor != LOCAL:
        raise InvalidArgument("a workload is tuned on one GPU of this machine: leave out "
                              "--executor, or tune its entries one by one")  # fmt: skip
    backend = backends.load(asked.backend)
    target, devices = choose_target(backend, asked)
    with ExitStack() as stack:
        store = asked.store or stack.enter_context(Store.open())
        asked = replace(asked, store=store)
        report = WorkloadReport(target.sku, "measured" if devices else "predicted")
        jobs, report.refused = jobs_of(workload.read(path), backend.entry, replays, entry)
        known = _Known(store, backend, target, asked, bool(devices))
        todo = [job for job in jobs if asked.fresh or not known(job)]
        report.known = len(jobs) - len(todo)
        end = time.monotonic() + (float("inf") if budget_s is None else budget_s)
        try:
            for number, job in enumerate(todo):
                remaining = end - time.monotonic()
                if remaining <= 0:
                    report.waiting = [job.name for job in todo[number:]]
                    break
                share = remaining * job.cost_us / (sum(j.cost_us for j in todo[number:]) or 1.0)
                share_s = None if budget_s is None else min(remaining, max(MIN_SHARE_S, share))
                each = {**vars(asked), "problems": [job.problem], "budget_s": share_s}
                try:
                    report.tunes.append(tune(job.entry.name, **each))
                except Unsupported as error:
                    report.refused[job.name] = str(error)
                else:
                    done(report.tunes[-1])
        except KeyboardInterrupt as stopped:
            if isinstance(stopped, Interrupted) and isinstance(stopped.report, TuneReport):
                report.tunes.append(stopped.report)
            raise Interrupted(report, _resume_command(path, entry, replays, asked)) from None
    return report


def jobs_of(
    uses: Iterable[Use],
    find: Callable[[str], Entry],
    replays: int = 1,
    only: str | None = None,
) -> tuple[list[Job], dict[str, str]]:
    """The problems of ``uses`` by cost, the largest first; and those of no use, with the reason.

    ``find`` returns the entry of a name. A problem may have several uses: several kernels served
    it, or it ran on several GPUs. ``only`` is the name of the entry whose problems count.
    """
    costs: dict[Problem, float] = defaultdict(float)
    for use in uses:
        if use.why != "forced" and only in (None, use.entry):
            costs[use.asked] += use.cost_us(replays)
    jobs, refused = [], {}
    for problem, cost_us in costs.items():
        try:
            entry = find(problem.entry)
            jobs.append(Job(entry, entry.problem(**problem.values), cost_us))
        except (UnknownName, InvalidArgument) as error:
            refused[f"{problem.entry} {problem}"] = str(error)
    return sorted(jobs, key=lambda job: -job.cost_us), refused


class _Known:
    """Whether a problem needs no tune: a call of this object with a job answers."""

    def __init__(
        self, store: Store, backend: backends.Backend, gpu: Gpu, asked: Options, is_measured: bool
    ) -> None:
        self.store, self.backend, self.gpu, self.asked = store, backend, gpu, asked
        self.is_measured = is_measured
        self.past = cache(self._past)
        self.digests = cache(self._digests)

    def __call__(self, job: Job) -> bool:
        digests = self.digests(job.entry.name)
        if not self.is_measured:
            where = {"entry": job.entry.name, "gpu": self.gpu.sku, "kind": "predicted"}
            rows = self.store.rows(**where, problem=job.problem, status="passed")
            return any(row.source == digests.get((row.language, row.variant)) for row in rows)
        past = self.past(job.entry.name)
        histories = (past.history(job.problem, digests, regime) for regime in self.asked.regimes)
        raced = {state for history in histories for _, state in history.incumbents}
        return raced >= {*self.asked.states} and not self.is_overtaken(job)

    def is_overtaken(self, job: Job) -> bool:
        """Whether the calibrated model expects a kernel to be faster than all that were measured
        for the problem, though that kernel was not: it may be newer than their race."""
        model = calibration.models(self.gpu.sku).get(job.entry.name)
        past, digests = self.past(job.entry.name), self.digests(job.entry.name)
        history = past.history(job.problem, digests, REGIME)
        if model is None or not history.times or REGIME not in self.asked.regimes:
            return False
        tried = {(each.language, each.variant) for each in (*history.times, *history.failed)}
        untried = {
            (each.language, each.variant): each
            for each in filter(self.asked.covers, self.backend.implementations(job.entry.name))
            if (each.language, each.variant) not in tried
        }
        best_us = min(history.times.values())

        def is_worth_a_try(each: Prediction) -> bool:
            """Whether a tune would screen the configuration, too."""
            implementation = untried[each.language, each.variant]
            return implementation.too_slow(each.config, job.problem, self.gpu) is None

        return any(
            each.high_us < best_us and is_worth_a_try(each)
            for each in predictions(model, job.problem, self.gpu, lambda *owner: owner in untried)
        )

    def _past(self, name: str) -> Past:
        shipped = shipped_rows(self.backend.entry(name), self.gpu)
        return Past.of(name, self.gpu.sku, self.store, shipped)

    def _digests(self, name: str) -> Mapping[tuple[str, str], str]:
        return {(i.language, i.variant): self.backend.digest(i)
                for i in self.backend.implementations(name)}  # fmt: skip


def _resume_command(path: Path, entry: str | None, replays: int, options: Options) -> str:
    """The command line that continues an interrupted tune."""
    words = ["tune", *([entry] if entry else []), "--workload", shlex.quote(str(path))]
    return options.command(*words, *([f"--replays {replays}"] if replays != 1 else []))
