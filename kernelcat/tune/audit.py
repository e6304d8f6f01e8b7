"""Audits of tunes: regret against the whole legal space, flips between two tunes, and time.

For each problem every legal configuration is screened first. Then each strategy tunes the problem
twice, with the same limit of candidates and without knowledge of earlier results: first with an
empty cache of compiled kernels, as a first tune has it, then with all kernels compiled.
The choices of all tunes and the best of the whole space meet in one race at the end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kernelcat.bench.stats import leader, ratio_interval, ties
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.audits import Audit, AuditedProblem, AuditedTune, ScreenedTimes, read
from kernelcat.store.measurement import now
from kernelcat.store.races import BURST, SCREEN
from kernelcat.tune import Limits, Quiet, TuneReport, screen_whole_space, search, tune
from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.messages import Failed, Timing
from kernelcat.tune.supervisor import Supervisor
from kernelcat.verify.seeds import MAX_PASSES, draw_seeds

NUM_PROBLEMS = 6
"""Problems of an entry that are audited if none are named."""
NUM_BEST = 8
"""Configurations of the whole space that race at the end, besides the choices of tunes."""
MAX_ATTEMPTS = 8
"""How often the last race is run, if it loses a contestant each time."""
CACHE = "KERNELCAT_CACHE"


def audit(
    name: str,
    *,
    problems: Sequence[str] | None = None,
    strategies: Sequence[str] | None = None,
    trials: int | None = None,
    languages: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    device: int = 0,
    budget_s: float | None = None,
    path: Path | None = None,
    report: Callable[[AuditedProblem], None] = lambda problem: None,
    backend: str = backends.CUDA,
    limits: Limits | None = None,
    processes: int | None = None,
) -> Audit:
    """Audits tunes of entry ``name`` on a GPU of this machine.

    Parameters
    ----------
    problems : names or descriptions; None chooses :data:`NUM_PROBLEMS` named ones of all sizes
    strategies : the strategies to compare; None is all
    trials : how many candidates each tune screens at most; None is ``search.SAMPLE_SIZE``
    budget_s : seconds after which no further problem is begun; None is no limit
    path
        File that gets all results so far after each problem. A problem that is in the file is not
        audited again.
    report : called with each problem, also with those that ``path`` has
    languages, variants, backend, limits, processes : as for :func:`kernelcat.tune.tune`

    Raises
    ------
    UnknownName
        There is no such entry, problem or strategy.
    InvalidArgument
        ``path`` has results of another kind or of other code.
    MissingDependency, LaunchError
        There is no GPU, a strategy's library is not installed, or the GPU does not work any more.
    """
    end = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    strategies, trials = strategies or tuple(search.STRATEGIES), trials or search.SAMPLE_SIZE
    for strategy in strategies:
        search.strategy(strategy, ())
    loaded = backends.load(backend)
    entry, gpu = loaded.entry(name), loaded.gpu(device)
    chosen = [entry.named(p) for p in problems] if problems else representative(entry, gpu)
    limits = limits or Limits()
    with closing(Supervisor(backend, device, limits)) as supervisor:
        greeting = supervisor.hello()
    found = Audit(
        name, gpu.sku, trials, list(strategies),
        {i.name: loaded.digest(i) for i in loaded.implementations(name)},
        greeting.regimes[0], BURST, now(), greeting.environment,
    )  # fmt: skip
    if path is not None and path.exists():
        found = _resumed(found, path)
    options = {
        "languages": languages, "variants": variants, "devices": (device,), "backend": backend,
        "limits": limits, "processes": processes, "peers": False, "fresh": True,
        "regimes": [found.regime], "states": [found.state], "progress": Quiet(),
    }  # fmt: skip
    auditor = Auditor(entry, strategies, trials, found.regime, options)
    known = {entry.problem(**problem.problem): problem for problem in found.problems}
    for problem in chosen:
        if problem not in known:
            if time.monotonic() > end:
                break
            known[problem] = auditor.audit(problem)
            found = found.with_problem(known[problem])
            if path is not None:
                found.write(path)
        report(known[problem])
    return found


def representative(entry: Entry, gpu: Gpu) -> list[Problem]:
    """:data:`NUM_PROBLEMS` named problems at equal distances in the order of their rooflines."""
    from kernelcat.tune.measure import largest_first

    ordered = largest_first(entry, list(entry.problems.values()), gpu)
    last = len(ordered) - 1
    count = min(NUM_PROBLEMS, len(ordered))
    return [ordered[round(number * last / max(1, count - 1))] for number in range(count)]


def _resumed(audit: Audit, path: Path) -> Audit:
    """The audit in ``path``, if it is of the same kind and code as ``audit`` will be."""
    found = read(path)
    for name in ("entry", "gpu", "trials", "strategies", "regime", "state", "sources"):
        then, today = getattr(found, name), getattr(audit, name)
        if then != today:
            raise InvalidArgument(f"{path} has an audit with {name}={then}, not {today}: name "
                                  "another file")  # fmt: skip
    return found


class Auditor:
    """Audits problems of ``entry``, one after the other; ``options`` are those of each tune."""

    def __init__(
        self, entry: Entry, strategies: Sequence[str], trials: int, regime: str,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.entry, self.strategies, self.trials = entry, strategies, trials
        self.regime, self.options = regime, options

    def audit(self, problem: Problem) -> AuditedProblem:
        whole = self._tune(problem, screen_whole_space)
        times = {
            Candidate(row.language, row.variant, row.to_config()): row.median_us
            for row in whole.rows
            if row.state == SCREEN and row.median_us is not None
        }
        audited = AuditedProblem(
            problem.values,
            self.entry.problem_name(problem),
            num_legal=whole.problems[0].num_candidates,
            num_promising=0,
            screened=dict(whole.problems[0].tried),
            seconds=whole.duration_s,
            times=self._tables(times),
            skipped=whole.skipped.get(whole.problems[0].name),
        )
        if audited.skipped:
            return audited
        choices: list[tuple[AuditedTune, Candidate | None]] = []
        for strategy in self.strategies:
            for compiled in (False, True):
                with empty_cache(not compiled):
                    report = self._tune(problem, tune, strategy=strategy, trials=self.trials)
                [tuned] = report.problems
                audited = replace(audited, num_promising=tuned.num_candidates)
                winner = tuned.winners.get((self.regime, BURST))
                result = AuditedTune(
                    strategy, compiled, tuned.tried.total(), report.duration_s,
                    failed=None if winner else tuned.skipped,
                )  # fmt: skip
                choices.append((result, winner.candidate if winner else None))
        best = sorted(times, key=lambda c: (times[c], c.key))[:NUM_BEST]
        contestants = dict.fromkeys([*best, *(c for _, c in choices if c is not None)])
        return self._raced(audited, problem, list(contestants), choices)

    def _tables(self, times: Mapping[Candidate, float]) -> dict[str, ScreenedTimes]:
        by_name: dict[str, dict[Config, float]] = defaultdict(dict)
        for candidate in sorted(times, key=lambda c: c.key):
            by_name[self._name(candidate)][candidate.config] = times[candidate]
        return {name: ScreenedTimes.of(each) for name, each in by_name.items()}

    def _tune(
        self, problem: Problem, work: Callable[..., TuneReport], **options: Any
    ) -> TuneReport:
        """The report of a tune into a database of its own."""
        from kernelcat.store import Store

        options |= {"problems": [problem], **self.options}
        with (
            tempfile.TemporaryDirectory(prefix="kernelcat-audit-") as folder,
            Store.open(Path(folder) / "tuning.sqlite3") as store,
        ):
            return work(self.entry.name, store=store, **options)

    def _raced(
        self,
        audited: AuditedProblem,
        problem: Problem,
        contestants: list[Candidate],
        choices: Sequence[tuple[AuditedTune, Candidate | None]],
    ) -> AuditedProblem:
        """``audited`` with the results of one race of all ``contestants`` that are right."""
        failed: dict[Candidate, str] = {}
        samples = self._samples(problem, contestants, failed)
        if isinstance(samples, str):
            return replace(audited, skipped=samples)
        best = leader(samples)
        tunes = [self._judged(result, c, best, samples, failed) for result, c in choices]
        flips = [s for s in self.strategies if _flips([c for r, c in choices if r.strategy == s],
                                                      samples)]  # fmt: skip
        return replace(
            audited, best=self._name(best), best_config=dict(best.config),
            best_us=median(samples[best]), flips=flips, tunes=tuple(tunes),
        )  # fmt: skip

    def _samples(
        self, problem: Problem, contestants: Sequence[Candidate], failed: dict[Candidate, str]
    ) -> dict[Candidate, Sequence[float]] | str:
        """The times of a race in which nobody fails, or why there is none; adds to ``failed``."""
        device, options = self.options["devices"][0], self.options
        place_seed, *seeds = draw_seeds(1 + 1 + MAX_PASSES)
        with closing(Supervisor(options["backend"], device, options["limits"])) as supervisor:
            placed = supervisor.place(problem, place_seed)
            if isinstance(placed, Failed):
                return f"the arrays cannot be prepared: {placed.detail}"
            for attempt in range(MAX_ATTEMPTS):
                able = [candidate for candidate in contestants if candidate not in failed]
                outcomes = supervisor.race(able, self.regime, BURST, attempt, seeds) if able else {}
                failed |= {c: o.detail for c, o in outcomes.items() if isinstance(o, Failed)}
                samples = {c: o.samples for c, o in outcomes.items() if isinstance(o, Timing)}
                if able and samples.keys() == set(able):
                    return dict(samples)
        return f"the race lost a contestant {MAX_ATTEMPTS} times"

    def _judged(
        self,
        result: AuditedTune,
        choice: Candidate | None,
        best: Candidate,
        samples: Mapping[Candidate, Sequence[float]],
        failed: Mapping[Candidate, str],
    ) -> AuditedTune:
        """``result`` with the choice of its tune, and that choice's regret."""
        if choice is None:
            return result
        result = replace(result, winner=self._name(choice), config=dict(choice.config))
        if choice in failed:
            return replace(result, failed=failed[choice])
        ratio = ratio_interval(samples[choice], samples[best])
        interval = (ratio.low - 1, ratio.high - 1)
        return replace(result, us=median(samples[choice]), regret=ratio.median - 1,
                       regret_ci=interval)  # fmt: skip

    def _name(self, candidate: Candidate) -> str:
        return f"{self.entry.name}/{candidate.language}/{candidate.variant}"


def _flips(
    choices: Sequence[Candidate | None], samples: Mapping[Candidate, Sequence[float]]
) -> bool:
    """Whether two choices differ by more than a tie; a choice that failed differs from others."""
    one, other = choices
    if one == other:
        return False
    if one not in samples or other not in samples:
        return True
    assert one is not None and other is not None
    ratio = ratio_interval(samples[one], samples[other])
    slower = ratio if ratio.median > 1 else ratio_interval(samples[other], samples[one])
    return not ties(slower)


@contextmanager
def empty_cache(is_wanted: bool) -> Iterator[None]:
    """The time in which processes that start find no compiled kernels, if that is wanted."""
    if not is_wanted:
        yield
        return
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory(prefix="kernelcat-audit-") as folder:
        os.environ[CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE]
            else:
                os.environ[CACHE] = before
