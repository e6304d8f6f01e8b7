"""Tuning one problem: screen, verify, race, write down."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kernelcat.bench.stats import decide, ratio_interval
from kernelcat.catalog.implementation import Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.store.measurement import Measurement
from kernelcat.store.races import LADDER, SCREEN, newest_races
from kernelcat.tune import search
from kernelcat.tune.candidate import PEER, Candidate, simplicity
from kernelcat.tune.messages import SKIPPED, Failed, Timing
from kernelcat.tune.pool import CompilePool
from kernelcat.tune.progress import Line
from kernelcat.tune.report import ProblemReport, TuneReport, Winner
from kernelcat.tune.rows import History, Writer
from kernelcat.tune.supervisor import Supervisor

if TYPE_CHECKING:
    from kernelcat.store import Store

CLOSE = 1.25
"""Screened within this factor of the best: good enough to race."""
FINALISTS = 6
SLOW = 4.0
"""The best of each variant races too unless it is this many times slower; on a ladder, always."""
TOO_LONG_US = 1e6
FAR_BEHIND = 30.0
"""Not tried at all: over a second a run by the model, and this many times the best."""
SEEDS = (1, 2)
"""Further seeds a finalist must pass."""
ATTEMPTS = 5
"""How often a race is run again after it lost a contestant."""


@dataclass
class Tools:
    """What every problem on one GPU shares, much of it with the other GPUs of the tune.

    ``lock`` guards ``store`` and ``report``; ``shipped`` are our rows of this entry and GPU.
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
    peers: bool = True
    fresh: bool = False
    shipped: Sequence[Measurement] = ()

    def keep(self, *rows: Measurement) -> None:
        """Write rows down for good, now."""
        with self.lock:
            self.store.keep(rows)
            self.report.rows += rows

    def note(self, text: str) -> None:
        """Tell the user, once."""
        with self.lock:
            self.report.note(text)


class ProblemTune:
    """One problem of a tune. ``deadline`` (``time.monotonic``) ends screening, never a race."""

    def __init__(self, tools: Tools, problem: Problem, deadline: float = float("inf")) -> None:
        self.tools, self.problem, self.deadline = tools, problem, deadline
        self.report = ProblemReport(tools.entry.problem_name(problem) or str(problem))
        self.times: dict[Candidate, float] = {}
        self.effort: dict[Candidate, float] = {}
        self.proven: set[Candidate] = set()
        self.lost: set[tuple[str, Candidate]] = set()  # peers that cannot do a regime
        self.history = self._history()
        self.promise_us = float("inf")  # the best by the model, until something is timed
        self.l2 = "cold"

    def run(self, candidates: Sequence[Candidate]) -> ProblemReport:
        """Tune among ``candidates``, the most promising first."""
        tools, report = self.tools, self.report
        report.known = sum(c in self.history.failed for c in candidates)
        tools.progress.problem(report.name, len(candidates))
        if not candidates:
            report.skipped = f"no implementation serves it on {tools.gpu.sku}"
            return report
        self.promise_us = min(map(self._estimate, candidates))
        placed = tools.supervisor.place(self.problem)
        if isinstance(placed, Failed):
            report.skipped = f"its arrays cannot be prepared: {placed.detail}"
            return report
        self.l2 = placed.l2
        self._search([c for c in candidates if c not in self.history.failed])
        if not self._verified():
            report.skipped = "no candidate passed"
            return report
        peers = self._peers() if tools.peers else []
        for state in tools.states:
            for regime in tools.regimes:
                self._race(regime, state, peers)
        return report

    def _history(self) -> History:
        tools = self.tools
        if tools.fresh:
            return History({}, {}, {})
        where = {"entry": tools.entry.name, "gpu": tools.gpu.sku}
        local = tools.store.rows(**where, problem=self.problem, kind="measured")
        known = [row for row in tools.shipped if row.problem_key == self.problem.key]
        incumbents = {}
        races = [row for race in tools.store.winners(**where, regime=None)
                 for row in race.measurements]  # fmt: skip
        for race in newest_races([*known, *races]):
            won = race.winner
            raced = race.key.kind == "measured" and race.key.state != SCREEN
            if raced and race.key.problem == self.problem.key:
                incumbent = Candidate(won.language, won.variant, won.to_config())
                incumbents[race.key.regime, race.key.state] = incumbent
        return History.of([*known, *local], incumbents, tools.writer.digests, tools.regimes[0])

    def _search(self, candidates: Sequence[Candidate]) -> None:
        """Screen what the strategy asks for, until it is done or time is up.

        An incumbent is a finalist even where its language or variant was not asked for: it loses
        its place by a race, not by staying at home.
        """
        for candidate in dict.fromkeys((*candidates, *self.history.incumbents.values())):
            if candidate in self.history.times:
                self.times[candidate] = self.history.times[candidate]
                self.effort[candidate] = float("inf")
                self.report.known += 1
        rounds = search.strategy(self.tools.strategy, candidates)
        step = next(rounds, None)
        while step is not None and not self.report.cut_short:
            self._screen_all(step)
            asked = set(step.candidates)
            try:
                step = rounds.send({c: t for c, t in self.times.items() if c in asked})
            except StopIteration:
                return

    def _screen_all(self, step: search.Round) -> None:
        """Compile ahead in the pool, and screen each candidate when its code is there."""
        tools, failed = self.tools, self.history.failed
        todo = [
            candidate
            for candidate in step.candidates
            if self.effort.get(candidate, 0) < step.effort_us and candidate not in failed
        ]
        for candidate, built in tools.pool.build(self.problem, todo):
            if time.monotonic() > self.deadline and self._all_had_a_turn(step.candidates):
                self.report.cut_short = True
                return
            if self._hopeless(candidate):
                tools.note(f"{candidate} was left out: by the model a run takes seconds")
                continue
            if isinstance(built, Failed):
                outcome: Timing | Failed = built
            else:
                best = min(self.times.values(), default=None)
                outcome = tools.supervisor.screen(candidate, step.effort_us, best)
            if isinstance(outcome, Failed) and outcome.status == SKIPPED:
                tools.note(f"{candidate} was left out: {outcome.detail}")
            else:
                self._screened(candidate, outcome, step.effort_us)

    def _hopeless(self, candidate: Candidate) -> bool:
        """Whether the model sees a naive kernel on a large problem: seconds a run, no chance."""
        best = min(self.times.values(), default=self.promise_us)
        return self._estimate(candidate) > max(TOO_LONG_US, FAR_BEHIND * best)

    def _estimate(self, candidate: Candidate) -> float:
        owner = (candidate.language, candidate.variant)
        found = next(i for i in self.tools.implementations if (i.language, i.variant) == owner)
        return found.estimate(self.problem, candidate.config, self.tools.gpu)

    def _all_had_a_turn(self, candidates: Sequence[Candidate]) -> bool:
        """Whether every implementation was tried: one that compiles slowly must not lose by it."""
        tried = {(c.language, c.variant) for c in (*self.times, *self.history.failed)}
        worth = {(c.language, c.variant) for c in candidates if not self._hopeless(c)}
        return bool(self.times) and worth <= tried

    def _screened(self, candidate: Candidate, outcome: Timing | Failed, effort_us: float) -> None:
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
        return self.tools.writer.row(self.problem, candidate, outcome, l2=self.l2, **more)

    def _fail(self, candidate: Candidate, failed: Failed, regime: str) -> None:
        """Write a failure down; the candidate is out, now and in later runs."""
        row = self._row(candidate, failed, regime=regime)
        self.tools.keep(row)
        self.report.tried[row.status] += 1
        self.times.pop(candidate, None)
        self.lost.add((regime, candidate))
        if candidate.is_peer:
            self.report.skipped_peers[candidate.variant] = f"{regime}: {failed.detail}"
        else:
            self.history.failed[candidate] = row.status

    def _finalists(self) -> list[Candidate]:
        """The close ones, the best of each language and variant, the default, the incumbent."""
        ranked = sorted(self.times, key=lambda c: (self.times[c], c.key))
        if not ranked:
            return []
        best = self.times[ranked[0]]
        close = [c for c in ranked if self.times[c] <= CLOSE * best]
        chosen = dict.fromkeys(close[:FINALISTS])
        languages = {c.language: c for c in reversed(ranked)}
        variants = {(c.language, c.variant): c for c in reversed(ranked)}
        chosen |= dict.fromkeys(languages.values())
        limit = float("inf") if LADDER in self.tools.states else SLOW * best
        chosen |= dict.fromkeys(c for c in variants.values() if self.times[c] <= limit)
        defaults = self._defaults()
        chosen |= dict.fromkeys(
            c for c in close if defaults.get((c.language, c.variant)) == c.config
        )
        chosen |= dict.fromkeys(c for c in self.history.incumbents.values() if c in self.times)
        return list(chosen)

    def _verified(self) -> list[Candidate]:
        """Finalists that passed on further seeds too.

        One that fails may have kept slower ones out, so they are chosen again until all pass.
        """
        while True:
            finalists = self._finalists()
            waiting = [c for c in finalists if c not in self.proven]
            if not waiting:
                return finalists
            for seed in SEEDS:
                self.tools.progress.phase(f"verifying, seed {seed}")
                waiting = [c for c in waiting if self._passes(c, seed)]
            self.proven |= set(waiting)

    def _passes(self, candidate: Candidate, seed: int) -> bool:
        reply = self.tools.supervisor.verify(candidate, seed)
        if not isinstance(reply, Failed):
            return True
        if reply.status == SKIPPED:
            self.tools.note(f"{self.report.name}: seed {seed} was not checked: {reply.detail}")
            return True
        self._fail(candidate, reply, self.tools.regimes[0])
        return False

    def _peers(self) -> list[Candidate]:
        """The peers that are here and right; the others are named in the report."""
        able = []
        for peer in self.tools.entry.peers:
            self.tools.progress.phase(f"peer {peer.name}")
            candidate = Candidate(PEER, peer.name)
            reply = self.tools.supervisor.verify(candidate, 0)
            if isinstance(reply, Failed):
                self.report.skipped_peers[peer.name] = reply.detail
            else:
                able.append(candidate)
        return able

    def _race(self, regime: str, state: str, peers: list[Candidate]) -> None:
        """Race until all finalists came through it right, then write the rows and the winner."""
        for attempt in range(ATTEMPTS):
            finalists = self._verified()
            if not finalists:
                self.report.skipped = "no candidate passed"
                return
            self.tools.progress.phase(f"racing ({regime}, {state})")
            able = [peer for peer in peers if (regime, peer) not in self.lost]
            times = self._times(regime, state, [*finalists, *able], attempt)
            if all(candidate in times for candidate in finalists):
                self._decide(regime, state, times)
                return
        self.report.skipped = f"the {regime} race lost a contestant {ATTEMPTS} times"

    def _times(
        self, regime: str, state: str, candidates: list[Candidate], seed: int
    ) -> dict[Candidate, Timing]:
        """Race; the times of all that came through. The failures of the others are written down."""
        times = {}
        outcomes = self.tools.supervisor.race(candidates, regime, state, seed)
        for candidate, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                self._fail(candidate, outcome, regime)
            else:
                times[candidate] = outcome
        return times

    def _decide(self, regime: str, state: str, times: Mapping[Candidate, Timing]) -> None:
        own = {c: timing.samples for c, timing in times.items() if not c.is_peer}
        order = partial(simplicity, ranks=self._ranks(), defaults=self._defaults())
        decision = decide(own, order, self.history.incumbents.get((regime, state)))
        rows = {
            c: self._row(c, timing, regime=regime, state=state, winner=c == decision.winner)
            for c, timing in times.items()
        }
        self.tools.keep(*rows.values())
        won = rows[decision.winner]
        assert won.median_us is not None
        self.report.winners[regime, state] = Winner(
            decision.winner, won.median_us, won.ci_us, decision.reason, len(decision.tied),
            *_best_peer(times, decision.winner),
        )  # fmt: skip

    def _defaults(self) -> dict[tuple[str, str], Any]:
        tools = self.tools
        return {
            (i.language, i.variant): search.default(i, self.problem, tools.gpu)
            for i in tools.implementations
        }

    def _ranks(self) -> dict[tuple[str, str], int]:
        return {(i.language, i.variant): i.rank for i in self.tools.implementations}


def _best_peer(
    times: Mapping[Candidate, Timing], winner: Candidate
) -> tuple[str | None, tuple[float, float, float] | None]:
    """The fastest peer and its time over the winner's, paired block by block."""
    mine = times[winner].samples
    ratios = {
        c.variant: ratio_interval(timing.samples, mine) for c, timing in times.items() if c.is_peer
    }
    if not ratios:
        return None, None
    name = min(ratios, key=lambda n: ratios[n].median)
    ratio = ratios[name]
    return name, (ratio.median, ratio.low, ratio.high)
