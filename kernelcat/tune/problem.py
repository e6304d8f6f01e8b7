"""Tuning one problem: screen candidates, verify the finalists, race them, store the results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kernelcat.bench.stats import decide, ratio_interval
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import LADDER
from kernelcat.tune import search
from kernelcat.tune.candidate import PEER, Candidate, simplicity
from kernelcat.tune.messages import SKIPPED, Failed, Timing
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Line
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import History, Past, Writer
from kernelcat.tune.supervisor import Supervisor
from kernelcat.verify.seeds import MAX_PASSES, draw_seeds

if TYPE_CHECKING:
    from kernelcat.store import Store

CLOSE_FACTOR = 1.25
"""A candidate races if its time in screening is within this factor of the fastest."""
MAX_CLOSE = 6
"""Upper limit of the candidates that race because they are close to the fastest."""
SLOW_FACTOR = 4.0
"""The best candidate of each variant races too, unless its time is over this factor times the
fastest. On a ladder it always races."""
HOPELESS_US = 1e6
HOPELESS_FACTOR = 30.0
"""A candidate is not tried at all if its estimate is over ``HOPELESS_US`` and over
``HOPELESS_FACTOR`` times the best time."""
NUM_SEEDS = 3
"""Seeds of a problem, drawn at run time: one for screening, and others that finalists must pass
too."""
MAX_ATTEMPTS = 8
"""How often a race is run before it is given up, if a contestant fails each time."""


@dataclass
class Tools:
    """Objects and options that the problems on one GPU share.

    All GPUs of the tune share ``pool``, ``store``, ``report`` and ``lock``, which guards ``store``
    and ``report``. ``shipped`` holds the rows of ``tuning_db/`` for this entry and GPU, without
    those of peers.
    """

    entry: Entry
    gpu: Any
    implementations: Sequence[Implementation]
    supervisor: Supervisor
    pool: CompilePool
    store: Store
    writer: Writer
    progress: Line
    report: TuneReport
    lock: threading.Lock
    regimes: Sequence[str]
    states: Sequence[str]
    strategy: str = "auto"
    trials: int | None = None
    peers: bool = True
    fresh: bool = False
    shipped: Sequence[Measurement] = ()

    def keep(self, *rows: Measurement) -> None:
        """Writes rows to the database and adds them to the report."""
        with self.lock:
            self.store.keep(rows)
            self.report.rows += rows

    def begin(self, tuning: ProblemTune) -> None:
        """Adds the report of ``tuning``, which goes on with the report of an earlier try."""
        with self.lock:
            tuning.report = self.report.begun(tuning.report)

    def note(self, text: str) -> None:
        """Adds a note to the report, unless there is the same note already."""
        with self.lock:
            self.report.note(text)


class ProblemTune:
    """One problem of a tune. Screening ends at ``deadline`` (``time.monotonic``); races do not."""

    def __init__(self, tools: Tools, problem: Problem, deadline: float = float("inf")) -> None:
        self.tools, self.problem, self.deadline = tools, problem, deadline
        self.report = ProblemReport(tools.entry.problem_name(problem) or str(problem))
        self.times: dict[Candidate, float] = {}
        self.effort: dict[Candidate, float] = {}
        self.verified: set[Candidate] = set()  # passed all extra seeds
        self.failed_in: set[tuple[str, Candidate]] = set()  # (regime, candidate)
        self.seeds = draw_seeds(NUM_SEEDS)
        self.race_seeds: tuple[int, ...] = ()
        self.history = self._history()
        self.best_estimate_us = float("inf")  # stands in for a time until a candidate is timed
        self.l2 = "cold"

    def run(
        self, candidates: Sequence[Candidate], screened: Callable[[], None] = lambda: None
    ) -> ProblemReport:
        """Tunes among ``candidates``, of which the most promising come first.

        ``screened`` is called when no candidate has to be compiled any more.
        """
        tools, report = self.tools, self.report
        report.num_candidates = len(candidates)
        report.known = sum(c in self.history.failed for c in candidates)
        tools.progress.problem(report.name, len(candidates))
        if not candidates:
            report.skipped = f"no implementation serves this problem on {tools.gpu.sku}"
            return report
        self.best_estimate_us = min(map(self._estimate, candidates))
        placed = tools.supervisor.place(self.problem, self.seeds[0])
        if isinstance(placed, Failed):
            report.skipped = f"the arrays cannot be prepared: {placed.detail}"
            return report
        self.l2 = placed.l2
        self._search([c for c in candidates if c not in self.history.failed])
        if report.cut_short:
            known = self.times.keys() | self.history.failed.keys()
            report.not_tried = sum(candidate not in known for candidate in candidates)
        screened()
        finalists = self._verified_finalists() if tools.states else self._finalists()
        if not finalists:
            report.skipped = "no candidate passed the checks"
            return report
        peers = self._peers() if tools.peers else []
        for state in tools.states:
            for regime in tools.regimes:
                if (regime, state) not in report.winners:  # raced before the machine was lost
                    self._race(regime, state, peers)
        return report

    def _history(self) -> History:
        """Results of earlier tunes, shipped and local, and the incumbents of all races."""
        tools = self.tools
        if tools.fresh:  # only what this tune measured before the problem's machine was lost
            rows = tools.store.rows(run=tools.report.run, gpu=tools.gpu.sku, problem=self.problem)
            return History.of(rows, {}, tools.writer.digests, tools.regimes[0])
        past = Past.of(tools.entry.name, tools.gpu.sku, tools.store, tools.shipped, self.problem)
        return past.history(self.problem, tools.writer.digests, tools.regimes[0])

    def _search(self, candidates: Sequence[Candidate]) -> None:
        """Screens the rounds of the strategy, until its end or the deadline.

        An incumbent is a finalist even if the tune is for other languages or variants: only a race
        can replace an incumbent.
        """
        for candidate in dict.fromkeys((*candidates, *self.history.incumbents.values())):
            if candidate in self.history.times:
                self.times[candidate] = self.history.times[candidate]
                self.effort[candidate] = float("inf")
                self.report.known += 1
        rounds = search.strategy(self.tools.strategy, candidates, self.tools.trials)
        step = next(rounds, None)
        while step is not None and not self.report.cut_short:
            self._screen_all(step)
            in_round = set(step.candidates)
            try:
                step = rounds.send({c: t for c, t in self.times.items() if c in in_round})
            except StopIteration:
                return

    def _screen_all(self, step: search.Round) -> None:
        """Screens the candidates of a round, each as soon as the pool has compiled it."""
        tools, failed = self.tools, self.history.failed
        todo = [
            candidate
            for candidate in step.candidates
            if self.effort.get(candidate, 0) < step.effort_us and candidate not in failed
        ]
        for candidate, built in tools.pool.build(self.problem, todo):
            if time.monotonic() > self.deadline and self._has_tried_all_variants(step.candidates):
                self.report.cut_short = True
                return
            if self._is_hopeless(candidate):
                tools.note(f"{candidate} was left out: by the cost model a run takes seconds")
                continue
            if isinstance(built, Failed):
                outcome: Timing | Failed = built
            else:
                best = min(self.times.values(), default=None)
                outcome = tools.supervisor.screen(candidate, step.effort_us, best)
            if isinstance(outcome, Failed) and outcome.status == SKIPPED:
                tools.note(f"{candidate} was left out: {outcome.detail}")
            else:
                self._record_screening(candidate, outcome, step.effort_us)

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether a run takes seconds by the cost model: a naive kernel on a large problem."""
        best = min(self.times.values(), default=self.best_estimate_us)
        return self._estimate(candidate) > max(HOPELESS_US, HOPELESS_FACTOR * best)

    def _estimate(self, candidate: Candidate) -> float:
        owner = (candidate.language, candidate.variant)
        by_name = {(i.language, i.variant): i for i in self.tools.implementations}
        return by_name[owner].estimate(self.problem, candidate.config, self.tools.gpu)

    def _has_tried_all_variants(self, candidates: Sequence[Candidate]) -> bool:
        """Whether every implementation was tried, also one whose candidates compile slowly."""
        tried = {(c.language, c.variant) for c in (*self.times, *self.history.failed)}
        promising = {(c.language, c.variant) for c in candidates if not self._is_hopeless(c)}
        return bool(self.times) and promising <= tried

    def _record_screening(
        self, candidate: Candidate, outcome: Timing | Failed, effort_us: float
    ) -> None:
        tools = self.tools
        row = self._row(candidate, outcome, regime=tools.regimes[0])
        tools.keep(row)
        self.report.tried[row.status] += 1
        if row.median_us is None:
            self.times.pop(candidate, None)
            self.history.failed[candidate] = row.status
        else:
            self.times[candidate] = row.median_us
            self.effort[candidate] = effort_us
        tools.progress.tried(candidate, row.status, min(self.times.values(), default=None))

    def _row(self, candidate: Candidate, outcome: Timing | Failed, **more: Any) -> Measurement:
        return self.tools.writer.row(
            self.problem,
            candidate,
            outcome,
            l2=self.l2,
            seeds=(*self.seeds, *self.race_seeds[1:]),
            **more,
        )

    def _record_failure(self, candidate: Candidate, failed: Failed, regime: str) -> None:
        """Stores a failure. A candidate that is no peer is not tried again, nor in later tunes."""
        row = self._row(candidate, failed, regime=regime)
        self.tools.keep(row)
        self.report.tried[row.status] += 1
        self.times.pop(candidate, None)
        self.failed_in.add((regime, candidate))
        if candidate.is_peer:
            self._leave_out(candidate.variant, f"{regime}: {failed.detail}")
        else:
            self.history.failed[candidate] = row.status

    def _finalists(self) -> list[Candidate]:
        """Candidates to race: those close to the fastest, the best of each language and variant.

        A default races if it is close to the fastest; an incumbent always races.
        """
        ranked = sorted(self.times, key=lambda c: (self.times[c], c.key))
        if not ranked:
            return []
        best = self.times[ranked[0]]
        close = [c for c in ranked if self.times[c] <= CLOSE_FACTOR * best]
        finalists = dict.fromkeys(close[:MAX_CLOSE])
        languages = {c.language: c for c in reversed(ranked)}
        variants = {(c.language, c.variant): c for c in reversed(ranked)}
        finalists |= dict.fromkeys(languages.values())
        limit = float("inf") if LADDER in self.tools.states else SLOW_FACTOR * best
        finalists |= dict.fromkeys(c for c in variants.values() if self.times[c] <= limit)
        defaults = self._defaults()
        finalists |= dict.fromkeys(
            c for c in close if defaults.get((c.language, c.variant)) == c.config
        )
        finalists |= dict.fromkeys(c for c in self.history.incumbents.values() if c in self.times)
        return list(finalists)

    def _verified_finalists(self) -> list[Candidate]:
        """Finalists that passed the extra seeds.

        A finalist that fails may have kept slower candidates out. The finalists are therefore
        chosen again, until all pass.
        """
        while True:
            finalists = self._finalists()
            waiting = [c for c in finalists if c not in self.verified]
            if not waiting:
                return finalists
            for seed in self.seeds[1:]:
                self.tools.progress.phase(f"verifying, seed {seed}")
                waiting = [c for c in waiting if self._passes(c, seed)]
            self.verified |= set(waiting)

    def _passes(self, candidate: Candidate, seed: int) -> bool:
        reply = self.tools.supervisor.verify(candidate, seed)
        if not isinstance(reply, Failed):
            return True
        if reply.status == SKIPPED:
            self.tools.note(f"{self.report.name}: seed {seed} was not checked: {reply.detail}")
            return True
        self._record_failure(candidate, reply, self.tools.regimes[0])
        return False

    def _peers(self) -> list[Candidate]:
        """The peers that are installed and right; the report has the reasons for the others."""
        peers = []
        for peer in self.tools.entry.peers:
            self.tools.progress.phase(f"peer {peer.name}")
            candidate = Candidate(PEER, peer.name)
            reply = self.tools.supervisor.verify(candidate, self.seeds[0])
            if isinstance(reply, Failed):
                self._leave_out(peer.name, reply.detail)
            else:
                peers.append(candidate)
        return peers

    def _leave_out(self, peer: str, why: str) -> None:
        self.report.skipped_peers[peer] = why
        self.tools.note(f"peer {peer} was left out of {self.report.name}: {why}")

    def _race(self, regime: str, state: str, peers: list[Candidate]) -> None:
        """Races until no finalist fails; stores the rows and the winner."""
        for attempt in range(MAX_ATTEMPTS):
            finalists = self._verified_finalists()
            if not finalists:
                self.report.skipped = "no candidate passed the checks"
                return
            self.tools.progress.phase(f"racing ({regime}, {state})")
            able_peers = [peer for peer in peers if (regime, peer) not in self.failed_in]
            times = self._race_once(regime, state, [*finalists, *able_peers], attempt)
            if all(candidate in times for candidate in finalists):
                self._decide(regime, state, times)
                return
        self.report.skipped = f"the {regime} race lost a contestant {MAX_ATTEMPTS} times"

    def _race_once(
        self, regime: str, state: str, candidates: list[Candidate], seed: int
    ) -> dict[Candidate, Timing]:
        """Runs one race and stores the failures; returns the times of all others."""
        times = {}
        # The worker still has the inputs of the seed that was verified last.
        self.race_seeds = (self.seeds[-1], *draw_seeds(MAX_PASSES))
        outcomes = self.tools.supervisor.race(candidates, regime, state, seed, self.race_seeds)
        for candidate, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                self._record_failure(candidate, outcome, regime)
            else:
                times[candidate] = outcome
        return times

    def _decide(self, regime: str, state: str, times: Mapping[Candidate, Timing]) -> None:
        """Stores the rows of a race, and adds its winner to the report."""
        samples = {c: timing.samples for c, timing in times.items() if not c.is_peer}
        order = partial(simplicity, ranks=self._ranks(), defaults=self._defaults())
        decision = decide(samples, order, self.history.incumbents.get((regime, state)))
        rows = {
            c: self._row(c, timing, regime=regime, state=state, winner=c == decision.winner)
            for c, timing in times.items()
        }
        self.tools.keep(*rows.values())
        row = rows[decision.winner]
        assert row.median_us is not None
        self.report.winners[regime, state] = Winner(
            decision.winner, row.median_us, row.ci_us, decision.reason, len(decision.tied),
            *best_peer(times, decision.winner),
        )  # fmt: skip

    def _defaults(self) -> dict[tuple[str, str], Any]:
        tools = self.tools
        return {
            (i.language, i.variant): search.default(i, self.problem, tools.gpu)
            for i in tools.implementations
        }

    def _ranks(self) -> dict[tuple[str, str], int]:
        return {(i.language, i.variant): i.rank for i in self.tools.implementations}


def best_peer(
    times: Mapping[Candidate, Timing], winner: Candidate
) -> tuple[str | None, tuple[float, float, float] | None]:
    """Name of the fastest peer, and its time over the winner's: median and bounds of the interval.

    The times are paired block by block.
    """
    winner_us = times[winner].samples
    ratios = {
        c.variant: ratio_interval(timing.samples, winner_us)
        for c, timing in times.items()
        if c.is_peer
    }
    if not ratios:
        return None, None
    name = min(ratios, key=lambda n: ratios[n].median)
    ratio = ratios[name]
    return name, (ratio.median, ratio.low, ratio.high)
