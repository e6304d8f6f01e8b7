"""Tuning and benchmarking: search, race and write down; or predict for a GPU that is not here.

Examples
--------
>>> from kernelcat.tune import tune
>>> report = tune("gemm", problems=["4096x4096x4096"], budget_s=60)
>>> print("\\n".join(report.lines()))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernelcat.bench.states import STATES, TUNED
from kernelcat.bench.timer import REGIMES
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import MissingDependency, UnknownName, Unsupported, nearest
from kernelcat.runtime import gpu as gpus
from kernelcat.runtime.devices import Devices, numbers, shared_sku
from kernelcat.runtime.environment import Environment
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.lines import shipped
from kernelcat.store.measurement import Measurement, new_run
from kernelcat.store.races import LADDER
from kernelcat.tune import backend as backends
from kernelcat.tune import progress as progresses
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.cross import cross_tune
from kernelcat.tune.measure import Choose, largest_first, measure
from kernelcat.tune.pool import CompilePool, default_processes
from kernelcat.tune.problem import ProblemTune, Tools
from kernelcat.tune.progress import Progress, Quiet
from kernelcat.tune.report import Interrupted, ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import Writer
from kernelcat.tune.supervisor import Limits, Supervisor

if TYPE_CHECKING:
    from kernelcat.store import Store

__all__ = [
    "Interrupted",
    "Limits",
    "ProblemReport",
    "Progress",
    "Quiet",
    "TuneReport",
    "Winner",
    "ladder",
    "race_best_known",
    "tune",
]


@dataclass(frozen=True)
class Options:
    """How to tune. Every field is an argument of :func:`tune`."""

    gpu: str | None = None
    devices: Devices = (0,)
    problems: Sequence[str | Problem] | None = None
    languages: Sequence[str] | None = None
    variants: Sequence[str] | None = None
    budget_s: float | None = None
    strategy: str = "auto"
    regimes: Sequence[str] = REGIMES
    states: Sequence[str] = TUNED
    peers: bool = True
    fresh: bool = False
    store: Store | None = None
    progress: Progress | None = None
    backend: str = backends.CUDA
    limits: Limits = field(default_factory=Limits)
    processes: int | None = None


def tune(entry: str, **options: Any) -> TuneReport:
    """Find the fastest configuration of every implementation of ``entry``, problem by problem.

    Every finished measurement is on disk at once: a tune that is stopped or killed goes on from
    there when it is started again, and what failed is not tried again for the same sources.

    Parameters
    ----------
    entry
        Name of the entry.
    gpu : str, optional
        SKU to tune for; None is the GPU of this machine. Another one is cross-tuned: candidates
        are compiled and ranked by a model, nothing runs, rows are ``predicted``.
    devices : numbers of GPUs, or ``all``
        The GPUs to measure on, of one SKU. Each takes one problem at a time, the largest first.
    problems : sequence of names or problems, optional
        None means every named problem of the entry.
    languages, variants : sequence of str, optional
        Only these implementations.
    budget_s : float, optional
        Seconds for all problems together; what is left is shared among those still to do.
    strategy : ``auto``, ``exhaustive``, ``random`` or ``halving``
    regimes : of ``graph`` (device time) and ``eager`` (host time included)
    states : of ``burst`` (cool chip) and ``sustained`` (hot chip); see ``kernelcat.bench.states``
    peers : bool
        Whether other people's implementations race too.
    fresh : bool
        Forget earlier results: screen everything again, failures included.
    store : kernelcat.store.Store, optional
        None opens the user's database.
    progress : Progress, optional
        None shows a bar on a terminal.
    backend : str
        ``module:factory`` of the :class:`~kernelcat.tune.backend.Backend`.
    limits : Limits
        Seconds after which something counts as hung.
    processes : int, optional
        Compiler processes.

    Raises
    ------
    UnknownName
        No such entry, problem, GPU, language, variant, strategy or state.
    InvalidArgument
        The GPUs are not of one SKU.
    MissingDependency
        No GPU here and none named, or CuPy is missing.
    Interrupted
        Ctrl-C; a ``KeyboardInterrupt`` that carries the report so far.
    """
    return _run("tune", entry, Options(**options), _everything)


def race_best_known(entry: str, **options: Any) -> TuneReport:
    """Race what would be called today: every implementation's best known configuration, and peers.

    The best known is the fastest in the database for the sources as they are, else the default.
    Takes the arguments of :func:`tune`.
    """
    return _run("bench", entry, Options(**{"strategy": "exhaustive", **options}), _best_known)


def ladder(entry: str, **options: Any) -> TuneReport:
    """Race the best known configuration of every variant, naive ones too, and the peers.

    What each step of the ladder brings can only be told from one race, and a tune leaves slow
    variants out of its own. Device time on a cool chip. Takes the arguments of :func:`tune`.
    """
    climbing = {"strategy": "exhaustive", "regimes": ("graph",), "states": (LADDER,)}
    return _run("ladder --measure", entry, Options(**{**climbing, **options}), _best_known)


def _everything(at: ProblemTune) -> list[Candidate]:
    return search.candidates(at.tools.implementations, at.problem, at.tools.gpu)


def _best_known(at: ProblemTune) -> list[Candidate]:
    chosen = []
    for implementation in at.tools.implementations:
        owner = (implementation.language, implementation.variant)
        known = {c: t for c, t in at.history.times.items() if (c.language, c.variant) == owner}
        config = search.default(implementation, at.problem, at.tools.gpu)
        if known:
            chosen.append(min(known, key=lambda c: (known[c], c.key)))
        elif config is not None:
            chosen.append(Candidate(*owner, Config(config)))
    return chosen


def _run(verb: str, name: str, options: Options, choose: Choose) -> TuneReport:
    from kernelcat.store import Store

    backend = backends.load(options.backend)
    entry = backend.entry(name)
    search.strategy(options.strategy, ())
    for state in options.states:
        if state not in STATES:
            raise UnknownName(f"unknown thermal state {state!r}{nearest(state, list(STATES))}")
    problems = _problems(entry, options.problems)
    implementations = _implementations(backend, entry, options)
    target, devices = _target(backend, options)
    start = time.monotonic()
    report = TuneReport(entry.name, target.sku, "measured" if devices else "predicted", new_run())
    everything = backend.implementations(entry.name)  # incumbents too, whatever was asked for
    digests = {(i.language, i.variant): backend.digest(i) for i in everything}
    with ExitStack() as stack:
        store = options.store or stack.enter_context(Store.open())
        progress = stack.enter_context(
            options.progress or progresses.default(entry.name, len(problems))
        )
        devices = devices[: max(1, len(problems))]  # a GPU without a problem has nothing to do
        processes = options.processes or default_processes(max(1, len(devices)))
        pool = CompilePool(options.backend, target, processes, options.limits.compile_s)
        stack.callback(pool.close)
        supervisors = [Supervisor(options.backend, i, options.limits) for i in devices]
        lock, rows = threading.Lock(), _shipped(entry, target)

        def equip(supervisor: Supervisor) -> Tools:
            hello = supervisor.hello()
            return Tools(
                entry=entry, gpu=target, implementations=implementations, supervisor=supervisor,
                pool=pool, store=store,
                writer=Writer(entry, target.sku, report.run, hello.environment, digests),
                progress=progress.line(f"GPU {supervisor.index}" if len(devices) > 1 else ""),
                report=report, lock=lock,
                regimes=[r for r in options.regimes if r in hello.regimes],
                states=options.states, strategy=options.strategy, peers=options.peers,
                fresh=options.fresh, shipped=rows,
            )  # fmt: skip

        try:
            if devices:
                queued = largest_first(entry, problems, target) if len(devices) > 1 else problems
                measure(supervisors, pool, equip, queued, options.budget_s, choose)
            else:
                environment = Environment.capture(target).to_json()
                writer = Writer(entry, target.sku, report.run, environment, digests)
                cross_tune(entry, target, implementations, problems, pool=pool, store=store,
                           writer=writer, progress=progress.line(), report=report,
                           deadline=start + (options.budget_s or float("inf")))  # fmt: skip
        except KeyboardInterrupt:
            # It may have come between writing a row down and noting it in the report.
            report.rows = max(report.rows, store.rows(run=report.run), key=len)
            raise Interrupted(report, _again(verb, name, options)) from None
        finally:
            order = [entry.problem_name(problem) or str(problem) for problem in problems]
            report.problems.sort(key=lambda done: order.index(done.name))
            report.restarts = sum(supervisor.restarts for supervisor in supervisors)
            report.duration_s = time.monotonic() - start
    return report


def _shipped(entry: Entry, gpu: Gpu) -> list[Measurement]:
    """What ``tuning_db/`` knows of our own implementations on this GPU, read once a tune."""
    rows = (row for row in shipped() if (row.entry, row.gpu) == (entry.name, gpu.sku))
    return [row for row in rows if not row.is_peer]


def _problems(entry: Entry, wanted: Sequence[str | Problem] | None) -> list[Problem]:
    """Each once, in the order asked for."""
    if wanted is None:
        return list(entry.problems.values())
    return list(dict.fromkeys(p if isinstance(p, Problem) else entry.named(p) for p in wanted))


def _implementations(
    backend: backends.Backend, entry: Entry, options: Options
) -> tuple[Implementation, ...]:
    found = tuple(
        i
        for i in backend.implementations(entry.name)
        if (options.languages is None or i.language in options.languages)
        and (options.variants is None or i.variant in options.variants)
    )
    if not found:
        raise Unsupported(f"{entry.name} has no implementation in the languages and variants asked "
                          f"for: see kernelcat show {entry.name}")  # fmt: skip
    return found


def _target(backend: backends.Backend, options: Options) -> tuple[Gpu, tuple[int, ...]]:
    """The GPU to tune for, and the numbers of those in this machine; none: it is not here."""
    try:
        devices = numbers(options.devices, backend.count())
        local = shared_sku({i: backend.gpu(i) for i in devices})
    except MissingDependency:
        if options.gpu is None:
            raise
        return gpus.find(options.gpu), ()
    if options.gpu is None or options.gpu == local.sku:
        return local, devices
    named = gpus.find(options.gpu)
    return (local, devices) if named.sku == local.sku else (named, ())


def _again(verb: str, entry: str, options: Options) -> str:
    """The command that goes on where this one stopped."""
    words = ["kernelcat", verb, entry]
    words += [f"--gpu {options.gpu}"] if options.gpu else []
    if options.devices == "all":
        words.append("--device all")
    elif tuple(options.devices) != (0,):
        words += [f"--device {number}" for number in options.devices]
    for problem in options.problems or ():
        words += [f"--problem {problem}"] if isinstance(problem, str) else []
    chosen = {"--language": options.languages, "--variant": options.variants}
    if LADDER not in options.states:
        chosen |= {"--regime": options.regimes} if options.regimes != REGIMES else {}
        chosen |= {"--state": options.states} if options.states != TUNED else {}
    for flag, values in chosen.items():
        words += [f"{flag} {value}" for value in values or ()]
    return " ".join(words)
