"""Races on random problems: what serves a program, untuned, against the peers and a short tune.

The kernels of the next problems are compiled while one problem is raced. A kernel that crashes,
hangs or is wrong fails its own race only.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kernelcat.catalog.random_problems import as_called, draw
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.errors import InvalidArgument, LaunchError, UnknownName, Unsupported
from kernelcat.runtime.gpu import Gpu
from kernelcat.store.measurement import now
from kernelcat.store.races import BURST
from kernelcat.store.random_races import RandomRace, RandomRaces, checked_seed, read
from kernelcat.tune import Quiet, tune
from kernelcat.tune import backend as backends
from kernelcat.tune.candidate import PEER, Candidate
from kernelcat.tune.messages import Failed, Timing
from kernelcat.tune.pool import CompilePool, default_processes
from kernelcat.tune.supervisor import Limits, Supervisor
from kernelcat.verify.seeds import MAX_PASSES, draw_seeds

if TYPE_CHECKING:
    from kernelcat.call.choice import Attempt, Decision

MAX_ATTEMPTS = 4
"""How often a race is run before it is given up, if it loses a peer each time."""


SHORT_TUNE_S = 45.0
"""Seconds of the tune of one problem."""
NOT_ASKED = "left out by --peer"
"""Why a peer that might compute the problem has no time."""
TUNE_SHARE = 0.5
"""Share of a budget that tunes may take together."""


def race_random(
    name: str,
    seed: str,
    *,
    count: int = 40,
    unusual: bool = False,
    device: int = 0,
    tunes: int = 0,
    peers: Sequence[str] = (),
    budget_s: float | None = None,
    path: Path | None = None,
    report: Callable[[RandomRace], None] = lambda race: None,
    backend: str = backends.CUDA,
    limits: Limits | None = None,
    processes: int | None = None,
) -> RandomRaces:
    """Races what serves the first ``count`` random problems of entry ``name`` with the peers.

    Parameters
    ----------
    seed : hash of the commit that is raced
    device : index of the GPU
    unusual : whether to draw problems with sizes and options that no model has
    tunes : how many problems, the first ones, also race with the choice of a short tune
    peers : names of the peers that race; empty for all of the entry's. Some compile for a minute
    budget_s : seconds after which no further problem is begun; None is no limit
    path
        File that gets all races so far after each race. The races that are in the file are not run
        again, unless they lack a tune.
    report : called with each race, also with those that ``path`` has
    backend, limits, processes : as for :func:`kernelcat.tune.tune`

    Raises
    ------
    InvalidArgument
        ``seed`` is no hash of a commit, or ``path`` has races of another kind or of other code.
    UnknownName, Unsupported
        There is no such entry or peer, or the entry has no random problems.
    MissingDependency, LaunchError
        There is no GPU, or the GPU does not work any more.
    """
    end = time.monotonic() + (budget_s if budget_s is not None else float("inf"))
    loaded = backends.load(backend)
    entry = loaded.entry(name)
    problems = draw(entry, checked_seed(seed), count, unusual)
    _check_peers(entry, peers)
    gpu = loaded.gpu(device)
    limits, _ = (limits or Limits()).for_cache()
    processes = processes or default_processes(1)
    with ExitStack() as stack:
        supervisor = Supervisor(backend, device, limits)
        stack.callback(supervisor.close)
        greeting = supervisor.hello()
        races = RandomRaces(
            name, gpu.sku, seed, greeting.regimes[0], BURST, now(), greeting.environment,
            unusual=unusual,
        )  # fmt: skip
        if path is not None and path.exists():
            races = _resumed(races, path, loaded)
        done = {r.number for r in races.races if r.number >= tunes or r.has_tune}
        for race in races.races:
            if race.number in done:
                report(race)
        threads = stack.enter_context(ThreadPoolExecutor(processes))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        pool = CompilePool(backend, gpu, processes, limits.compile_s)
        stack.callback(pool.close)  # ends the threads that wait for the pool
        runner = Runner(loaded, supervisor, pool, entry, gpu, races.regime, tuple(peers))
        decisions = {
            number: threads.submit(runner.decide, problem)
            for number, problem in enumerate(problems)
            if number not in done
        }
        for number, decision in decisions.items():
            if time.monotonic() > end:
                break
            seconds = _tune_seconds(end, tunes - number)
            race = runner.race(number, problems[number], decision, seconds)
            races = races.with_race(race)
            if path is not None:
                races.write(path)
            report(race)
    return races


def _check_peers(entry: Entry, names: Sequence[str]) -> None:
    """Raise ``UnknownName`` unless ``names`` are peers of ``entry``."""
    known = [peer.name for peer in entry.peers]
    if unknown := [name for name in names if name not in known]:
        has = ", ".join(known) or "none"
        raise UnknownName(f"{entry.name} has no peer {unknown[0]!r}; it has: {has}")


def _resumed(races: RandomRaces, path: Path, backend: backends.Backend) -> RandomRaces:
    """The races in ``path``, if they are of the same kind and code as ``races`` will be."""
    found = read(path)
    for name in ("entry", "gpu", "seed", "unusual", "regime", "state"):
        then, today = getattr(found, name), getattr(races, name)
        if then != today:
            raise InvalidArgument(f"{path} has races with {name}={then}, not {today}: name "
                                  "another file")  # fmt: skip
    digests = {i.name: backend.digest(i) for i in backend.implementations(races.entry)}
    for race in found.races:
        if race.implementation is not None and digests.get(race.implementation) != race.source:
            raise InvalidArgument(f"{path} has races of other code ({race.implementation}): name "
                                  "another file")  # fmt: skip
    return found


def _tune_seconds(end: float, left: int) -> float:
    """Seconds for the next of ``left`` tunes, 0 without one; the budget ends at ``end``."""
    if left <= 0:
        return 0.0
    return min(SHORT_TUNE_S, TUNE_SHARE * max(1.0, end - time.monotonic()) / left)


class _Lost(Exception):
    """A race has no right result; the text says why."""


@dataclass
class Runner:
    """Decides what serves a problem, and races the decision with the entry's peers."""

    backend: backends.Backend
    supervisor: Supervisor
    pool: CompilePool
    entry: Entry
    gpu: Gpu
    regime: str
    peers: tuple[str, ...] = ()
    """Names of the peers that race; empty for all."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self, problem: Problem) -> Decision:
        """What serves ``problem`` and compiles, as a call finds it; else ``Unsupported``."""
        failed: dict[Attempt, str] = {}
        called = as_called(self.entry, problem)
        while True:
            with self.lock:
                decision = self.backend.decide(self.entry, called, self.gpu, failed)
            candidate = Candidate.of(decision.implementation, decision.config)
            [(_, built)] = self.pool.build(problem, [candidate])
            if not isinstance(built, Failed):
                return decision
            failed[decision.implementation.name, decision.config.key] = built.detail

    def race(
        self, number: int, problem: Problem, waiting: Future[Decision], tune_s: float
    ) -> RandomRace:
        """The race of ``problem``, which ``waiting`` will serve; ``tune_s`` 0 is no tune."""
        race = RandomRace(number, problem.values)
        try:
            decision = waiting.result()
            chosen = decision.implementation
            race = replace(
                race,
                implementation=chosen.name,
                config=dict(decision.config),
                why=decision.why,
                evidence=None if decision.evidence is None else decision.evidence.problem.values,
                grids=[
                    math.prod(step.grid)
                    for step in chosen.program(problem, decision.config, self.gpu).steps
                ],
                source=self.backend.digest(chosen),
            )
            tuned = None
            if tune_s:
                tuned, reason = self._tuned(problem, tune_s)
                race = replace(race, untuned=reason)
            return self._raced(race, problem, Candidate.of(chosen, decision.config), tuned)
        except (Unsupported, _Lost) as error:
            return replace(race, failed=str(error))
        except LaunchError as error:
            if self.supervisor.channel is None:
                self.supervisor.hello()  # raises for a GPU that does not work any more
            return replace(race, failed=str(error))

    def _tuned(self, problem: Problem, seconds: float) -> tuple[Candidate | None, str | None]:
        """What a tune of ``seconds`` chooses, or why it chooses nothing.

        Its database is thrown away: what it measured must not serve the next problems. The tune
        has a measuring process of its own, which gets the memory of the device.
        """
        from kernelcat.store import Store

        self.supervisor.clear()

        with (
            tempfile.TemporaryDirectory() as folder,
            Store.open(Path(folder) / "tune.sqlite") as store,
        ):
            report = tune(
                self.entry.name, problems=[problem], budget_s=seconds, peers=False,
                regimes=[self.regime], states=[BURST], store=store, progress=Quiet(),
                backend=self.supervisor.spec, devices=(self.supervisor.index,),
                limits=self.supervisor.limits, processes=self.pool.processes,
            )  # fmt: skip
        [tuned] = report.problems
        winner = tuned.winners.get((self.regime, BURST))
        if winner is None:
            return None, tuned.skipped or f"no candidate was timed in {seconds:.0f} s"
        return winner.candidate, None

    def _raced(
        self, race: RandomRace, problem: Problem, ours: Candidate, tuned: Candidate | None
    ) -> RandomRace:
        """``race`` with the times of ``ours``, of ``tuned`` and of all peers that are right."""
        supervisor, (place_seed, *seeds) = self.supervisor, draw_seeds(1 + 1 + MAX_PASSES)
        placed = supervisor.place(problem, place_seed)
        if isinstance(placed, Failed):
            raise _Lost(f"the arrays cannot be prepared: {placed.detail}")
        _right(supervisor.verify(ours, place_seed))
        peers, skipped = [], {}
        for peer in self.entry.peers:
            if self.peers and peer.name not in self.peers:
                skipped[peer.name] = NOT_ASKED
                continue
            reply = supervisor.verify(Candidate(PEER, peer.name), place_seed)
            if isinstance(reply, Failed):
                skipped[peer.name] = reply.detail
            else:
                peers.append(Candidate(PEER, peer.name))
        others = [tuned] if tuned and tuned != ours else []
        for attempt in range(MAX_ATTEMPTS):
            able = [peer for peer in peers if peer.variant not in skipped]
            outcomes = supervisor.race([ours, *others, *able], self.regime, BURST, attempt, seeds)
            _right(outcomes.get(ours))
            failed = {c: o.detail for c, o in outcomes.items() if isinstance(o, Failed)}
            skipped |= {c.variant: detail for c, detail in failed.items() if c.is_peer}
            if tuned in failed:
                race, tuned, others = replace(race, untuned=failed[tuned]), None, []
            times = {c: median(o.samples) for c, o in outcomes.items() if isinstance(o, Timing)}
            if times.keys() == {ours, *others, *able}:
                named = {c.variant: us for c, us in times.items() if c.is_peer}
                race = replace(race, us=times[ours], peers=named, skipped_peers=skipped)
                race = replace(race, l2=placed.l2)
                return race if tuned is None else self._with_tune(race, tuned, times[tuned])
        raise _Lost(f"the race lost a contestant {MAX_ATTEMPTS} times: {skipped}")

    def _with_tune(self, race: RandomRace, tuned: Candidate, us: float) -> RandomRace:
        name = f"{self.entry.name}/{tuned.language}/{tuned.variant}"
        return replace(race, tuned=name, tuned_config=dict(tuned.config), tuned_us=us)


def _right(reply: object) -> None:
    """Raises for a reply about our candidate that is a failure."""
    if isinstance(reply, Failed):
        raise _Lost(f"{reply.status}: {reply.detail}")
