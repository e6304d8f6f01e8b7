"""Tuning: finds the fastest configurations by searching and racing, and stores all results.

For a GPU that is not in this machine, times are predicted instead of measured.

Examples
--------
>>> from kernelcat.tune import tune
>>> report = tune("gemm", problems=["4096x4096x4096"], budget_s=60)
>>> print("\\n".join(report.lines()))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kernelcat.bench.states import STATES
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, UnknownName, Unsupported, nearest
from kernelcat.runtime.environment import Environment
from kernelcat.runtime.gpu import Gpu
from kernelcat.store import lines
from kernelcat.store.measurement import Measurement, new_run
from kernelcat.store.races import LADDER
from kernelcat.tune import backend as backends
from kernelcat.tune import executor as executors
from kernelcat.tune import progress as progresses
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.cross import cross_tune
from kernelcat.tune.executor import Plan, Slot, Waiting
from kernelcat.tune.measure import Choose, largest_first, measure
from kernelcat.tune.options import Options
from kernelcat.tune.pool import CompilePool, default_processes
from kernelcat.tune.problem import ProblemTune, Tools
from kernelcat.tune.progress import Progress, Quiet
from kernelcat.tune.report import Interrupted, ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Writer
from kernelcat.tune.supervisor import Limits

__all__ = [
    "Interrupted",
    "Limits",
    "Options",
    "ProblemReport",
    "Progress",
    "Quiet",
    "TuneReport",
    "Winner",
    "ladder",
    "race_best_known",
    "screen_whole_space",
    "tune",
]


def tune(entry: str, **options: Any) -> TuneReport:
    """Finds the fastest configuration of every implementation of ``entry``, problem by problem.

    Every measurement is written to the database at once. A tune that was stopped or killed goes on
    when it is started again. A candidate that failed is not tried again for the same sources.

    Parameters
    ----------
    entry
        Name of the entry.
    gpu : str, optional
        SKU to tune for; None is the GPU of this machine. For a GPU that is not in this machine,
        candidates are compiled and ranked by the cost model, nothing runs, and the rows are
        ``predicted``.
    devices : numbers of GPUs, or ``all``, optional
        GPUs of one SKU on which to measure; None is GPU 0. Each GPU tunes one problem at a time.
        Several GPUs start with the largest problems.
    problems : sequence of names, descriptions or problems, optional
        None means every named problem of the entry. A description gives axis values:
        ``M=256,N=512,K=64``.
    languages, variants : sequence of str, optional
        Only these implementations.
    budget_s : float, optional
        Seconds for all problems together. Each next problem gets an equal share of the time that
        remains.
    strategy : ``auto``, ``exhaustive``, ``random``, ``halving`` or ``tpe``
    trials : int, optional
        How many candidates of a problem are screened at most; None is the strategy's own limit.
    regimes : of ``graph`` (device time) and ``eager`` (host time included)
    states : of ``burst`` (cool chip) and ``sustained`` (hot chip); see ``kernelcat.bench.states``
    peers : bool
        Whether peers race too.
    fresh : bool
        Ignore earlier results: screen every candidate again, also those that failed.
    store : kernelcat.store.Store, optional
        None opens the user's database.
    progress : Progress, optional
        None shows a bar on a terminal, and elsewhere writes lines to standard error.
    backend : str
        ``module:factory`` of the :class:`~kernelcat.tune.backend.Backend`.
    limits : Limits
        Seconds after which a request counts as hung.
    processes : int, optional
        Number of compiler processes; None chooses by the number of cores. On a Ray cluster it is
        the number for each GPU.
    executor : ``local`` (this machine's GPUs) or ``ray`` (a running Ray cluster)
    address : str, optional
        ``HOST:PORT`` of the cluster's head, or ``auto``; this machine must belong to the cluster.
        None is $RAY_ADDRESS, else ``auto``.

    Raises
    ------
    UnknownName
        There is no such entry, problem, GPU, strategy, state or executor.
    Unsupported
        No implementation has the given languages and variants.
    InvalidArgument
        The GPUs are not of one SKU, or there is no such backend.
    MissingDependency
        There is no GPU in this machine and ``gpu`` is None, there is no cluster, or CuPy is
        missing.
    Interrupted
        Ctrl-C; a ``KeyboardInterrupt`` that holds the report so far.
    """
    return _run("tune", entry, Options(**options), _all_candidates)


def race_best_known(entry: str, **options: Any) -> TuneReport:
    """Races the best known configuration of every implementation, and the peers.

    The best known configuration is the fastest one in the database that was measured with today's
    code, else the default. Takes the arguments of :func:`tune`.
    """
    return _run("bench", entry, Options(**{"strategy": "exhaustive", **options}), _best_known)


def ladder(entry: str, **options: Any) -> TuneReport:
    """Races the best known configuration of every variant, also naive ones, and the peers.

    The gain from one step of the ladder to the next needs both in one race, and the races of a tune
    leave slow variants out. A ladder measures device time on a cool chip. Takes the arguments of
    :func:`tune`.
    """
    ladder_options = {"strategy": "exhaustive", "regimes": ("graph",), "states": (LADDER,)}
    return _run("ladder --measure", entry, Options(**{**ladder_options, **options}), _best_known)


def screen_whole_space(entry: str, **options: Any) -> TuneReport:
    """Screens every legal configuration, also those that are not worth a try; races nothing.

    Takes the arguments of :func:`tune`, but for ``strategy`` and ``states``.
    """
    screening = {**options, "strategy": "exhaustive", "states": ()}
    return _run("tune", entry, Options(**screening), _legal_candidates)


def _legal_candidates(tuning: ProblemTune) -> list[Candidate]:
    tools = tuning.tools
    return search.candidates(tools.implementations, tuning.problem, tools.gpu, legal=True)


def _all_candidates(tuning: ProblemTune) -> list[Candidate]:
    return search.candidates(tuning.tools.implementations, tuning.problem, tuning.tools.gpu)


def _best_known(tuning: ProblemTune) -> list[Candidate]:
    candidates = []
    for implementation in tuning.tools.implementations:
        owner = (implementation.language, implementation.variant)
        times = {c: t for c, t in tuning.history.times.items() if (c.language, c.variant) == owner}
        config = search.default(implementation, tuning.problem, tuning.tools.gpu)
        if times:
            candidates.append(min(times, key=lambda c: (times[c], c.key)))
        elif config is not None:
            candidates.append(Candidate(*owner, Config(config)))
    return candidates


def _run(verb: str, name: str, options: Options, choose: Choose) -> TuneReport:
    from kernelcat.store import Store

    if options.budget_s is not None and not options.budget_s > 0:
        raise InvalidArgument(f"a budget of {options.budget_s:g} s is no time: give more, or leave "
                              "the budget out for no limit")  # fmt: skip
    backend = backends.load(options.backend)
    entry = backend.entry(name)
    search.strategy(options.strategy, ())
    for state in options.states:
        if state not in STATES:
            raise UnknownName(f"unknown thermal state {state!r}{nearest(state, list(STATES))}")
    problems = _problems(entry, options.problems)
    implementations = _implementations(backend, entry, options)
    # Of all implementations: an incumbent may be of another language or variant than the options.
    digests = {
        (i.language, i.variant): backend.digest(i) for i in backend.implementations(entry.name)
    }
    tuned = {(i.language, i.variant): digests[i.language, i.variant] for i in implementations}
    start = time.monotonic()
    with ExitStack() as stack:
        executor = stack.enter_context(executors.make(backend, options))
        target = executor.gpu
        report = TuneReport(entry.name, target.sku, "measured", new_run())
        slots = executor.slots(Plan(entry.name, tuned, len(problems), report.note))
        report.kind = "measured" if slots else "predicted"
        store = options.store or stack.enter_context(Store.open())
        progress = stack.enter_context(
            options.progress or progresses.default(entry.name, len(problems))
        )
        shown = {
            slot.index: progress.line(f"GPU {slot.index}" if len(slots) > 1 else "")
            for slot in slots
        }
        lock, shipped = threading.Lock(), shipped_rows(entry, target)

        def make_tools(slot: Slot, is_over: Callable[[], bool]) -> Tools | None:
            line = shown[slot.index]
            hello = slot.open(Waiting(is_over, line.phase))
            if hello is None:
                return None
            return Tools(
                entry=entry, gpu=target, implementations=implementations,
                supervisor=slot.supervisor, pool=slot.pool, store=store,
                writer=Writer(entry, target.sku, report.run, hello.environment, digests),
                progress=line, report=report, lock=lock,
                regimes=[r for r in options.regimes if r in hello.regimes],
                states=options.states, strategy=options.strategy, trials=options.trials,
                peers=options.peers,
                fresh=options.fresh, shipped=shipped,
            )  # fmt: skip

        try:
            if slots:
                queued = largest_first(entry, problems, target) if len(slots) > 1 else problems
                measure(slots, make_tools, queued, options.budget_s, choose)
            else:
                environment = Environment.capture(target).to_json()
                writer = Writer(entry, target.sku, report.run, environment, digests)
                processes = options.processes or default_processes(1)
                pool = CompilePool(options.backend, target, processes, options.limits.compile_s)
                stack.callback(pool.close)
                cross_tune(entry, target, implementations, problems, pool=pool, store=store,
                           writer=writer, progress=progress.line(), report=report,
                           start=start, budget_s=options.budget_s)  # fmt: skip
        except KeyboardInterrupt:
            # Ctrl-C may have come after a row was stored and before it was added to the report.
            report.rows = max(report.rows, store.rows(run=report.run), key=len)
            raise Interrupted(report, options.command(verb, name)) from None
        finally:
            order = [entry.problem_name(problem) or str(problem) for problem in problems]
            report.problems.sort(key=lambda problem: order.index(problem.name))
            report.restarts = sum(slot.restarts for slot in slots)
            report.duration_s = time.monotonic() - start
    return report


def shipped_rows(entry: Entry, gpu: Gpu) -> list[Measurement]:
    """The rows of ``tuning_db/`` for ``entry`` on ``gpu``, without those of peers."""
    rows = (row for row in lines.shipped() if (row.entry, row.gpu) == (entry.name, gpu.sku))
    return [row for row in rows if not row.is_peer]


def _problems(entry: Entry, problems: Sequence[str | Problem] | None) -> list[Problem]:
    """The problems with the given names, in the given order, without duplicates; None: all."""
    if problems is None:
        return list(entry.problems.values())
    return list(dict.fromkeys(p if isinstance(p, Problem) else entry.named(p) for p in problems))


def _implementations(
    backend: backends.Backend, entry: Entry, options: Options
) -> tuple[Implementation, ...]:
    implementations = tuple(filter(options.covers, backend.implementations(entry.name)))
    if not implementations:
        raise Unsupported(f"{entry.name} has no implementation with the given languages and "
                          f"variants: kernelcat show {entry.name} lists all")  # fmt: skip
    return implementations
