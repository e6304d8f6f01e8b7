"""Races of entries of several ranks with NCCL and torch's symmetric memory, in CUDA graphs.

Contestants run in interleaved blocks. A block replays a graph of one contestant on all ranks, which
begin together; its time is that of the rank that began last, because the others wait for it. Where
no rank waits for another (a one-sided entry) it is that of the rank that takes longest. A time
holds everything that a node of the graph costs, launch included. Inputs stay where they are, so
small ones are in L2.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from kernelcat import catalog
from kernelcat.bench import peers as views
from kernelcat.bench.stats import median_interval
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.ranks import processes, shares
from kernelcat.ranks.group import Group
from kernelcat.ranks.processes import JobFailed, RanksSilent
from kernelcat.ranks.rendezvous import by_rank
from kernelcat.ranks.torch_peers import NO_MULTICAST, PEERS, Peers
from kernelcat.runtime import gpu, telemetry
from kernelcat.runtime.device import Run
from kernelcat.runtime.environment import Environment
from kernelcat.store.measurement import Status
from kernelcat.tune.ahead import compile_candidates
from kernelcat.tune.candidate import PEER, Candidate
from kernelcat.tune.messages import Failed, Timing

SHORT, LONG_US, MAX_NODES = 10, 1000.0, 500
"""Runs in a graph that is screened; microseconds that a raced graph takes, long beside the gap
between two replays; and the most runs in it."""
SCREEN_US, BLOCK_US = 500.0, 3000.0
"""Microseconds of the time that decides among the configurations of a variant, and of a block."""
BLOCKS = 21
LIMIT_S = 600.0
"""Seconds after which the ranks of one race count as hung."""
SILENCE_S = 60.0
"""Seconds after which one contestant of a race does: its first runs take a second or two."""
CRASHED, TIMEOUT = "crashed", "timeout"
"""What a row says of a contestant with which the ranks failed, or hung."""
ANNOUNCED = "next: "
"""What a line on standard error begins with that names the contestant that comes next."""


@dataclass(frozen=True)
class Raced:
    """A race of one problem.

    Attributes
    ----------
    ranks : number of ranks
    environment : that of the machine; its ``sku`` names the GPUs together (``h200x2-nvlink``)
    times : contestants that were right on all ranks, the best configuration of each variant
    failed : configurations and peers that were wrong, did not compile, or that torch refused
    left_out : why there are no peers, or None
    """

    problem: Problem
    ranks: int
    environment: Mapping[str, Any]
    times: Mapping[Candidate, Timing]
    failed: Mapping[Candidate, Failed]
    left_out: str | None

    def rows(self) -> list[dict[str, Any]]:
        """A row for each contestant, as JSON."""
        entry = catalog.entry(self.problem.entry)
        head = {
            "entry": entry.name,
            "problem": entry.problem_name(self.problem) or str(self.problem),
            "ranks": self.ranks,
            "topology": self.environment["sku"],
            "gpu": self.environment["name"],
        }
        rows = [{**_named(each), **_summary(timing)} for each, timing in self.times.items()]
        rows += [{**_named(each), "wrong": why.detail} for each, why in self.failed.items()]
        rows += [{"left_out": self.left_out}] if self.left_out else []
        return [{**head, **row} for row in rows]


def _named(candidate: Candidate) -> dict[str, Any]:
    return {"contestant": f"{candidate.language}/{candidate.variant}",
            "config": dict(candidate.config)}  # fmt: skip


def _summary(timing: Timing) -> dict[str, Any]:
    interval = median_interval(timing.samples)
    return {
        "regime": "graph",
        "median_us": round(interval.median, 3),
        "ci_us": [round(interval.low, 3), round(interval.high, 3)],
        "samples": len(timing.samples),
    }


def run(
    implementations: Sequence[Implementation],
    problem: Problem,
    gpus: Sequence[int],
    peers: bool = True,
) -> Raced:
    """Race implementations of one entry with peers. The ranks take ``gpus`` in turn.

    Raises ``RankFailed``. Ranks would compile one kernel after the other, and each the same ones:
    all cores compile them before. A contestant with which the ranks fail, or that gives no sign for
    :data:`SILENCE_S` seconds, is left out of the next attempt.
    """
    machine = gpu.detect(gpus[0])
    compile_candidates(
        [(problem, Candidate.of(implementation, config)) for implementation in implementations
         for config in implementation.configs(problem, machine)], machine,
    )  # fmt: skip
    ranks = int(problem[str(catalog.entry(problem.entry).ranks)])
    job = {
        "verb": "race", "entry": problem.entry, "problem": problem.values, "seed": 1,
        "implementations": [(i.language, i.variant) for i in implementations], "peers": peers,
    }  # fmt: skip
    numbers, ended = list(islice(cycle(gpus), ranks)), dict[Candidate, Failed]()
    while True:
        job["left_out"] = [_names(candidate) for candidate in ended]
        try:
            first = processes.run(job, numbers, LIMIT_S, SILENCE_S)[0]
            break
        except JobFailed as error:
            last = _announced(error.lines)
            if last is None or last in ended:
                raise
            is_silent = isinstance(error, RanksSilent)
            why = f"the ranks gave no sign for {SILENCE_S:g} s" if is_silent else str(error)
            ended[last] = Failed(TIMEOUT if is_silent else CRASHED, why)
    times, failed = {}, dict(ended)
    for language, variant, config, detail, status, samples, readings in first["contestants"]:
        candidate = Candidate(language, variant, Config(config))
        if detail:
            failed[candidate] = Failed(status, detail)
        else:
            seen = tuple(telemetry.Reading(*reading) for reading in readings)
            times[candidate] = Timing(tuple(samples), seen)
    return Raced(problem, ranks, first["environment"], times, failed, first["left_out"])


def _names(candidate: Candidate) -> list[Any]:
    return [candidate.language, candidate.variant, dict(candidate.config)]


def _announced(lines: Sequence[str]) -> Candidate | None:
    """The contestant that :meth:`Race.announce` named last, or None."""
    for line in reversed(lines):
        if line.startswith(ANNOUNCED):
            language, variant, config = json.loads(line.removeprefix(ANNOUNCED))
            return Candidate(language, variant, Config(config))
    return None


@dataclass
class Contestant:
    """A run and the graph of ``nodes`` such runs. ``us`` is its time so far; ``detail`` is what was
    wrong, if anything, and ``status`` what a row of it says then."""

    candidate: Candidate
    run: Run | None
    detail: str = ""
    status: Status = "wrong"
    graph: Any = None
    nodes: int = SHORT
    us: float = 0.0
    samples: list[float] = field(default_factory=list)
    readings: list[telemetry.Reading] = field(default_factory=list)

    def replays(self, target_us: float) -> int:
        """Replays that fill ``target_us``: as many on every rank, because ``us`` is the same."""
        return max(1, round(target_us / (self.us * self.nodes)))

    def to_json(self) -> list[Any]:
        """What :func:`run` reads."""
        candidate = self.candidate
        readings = [list(vars(reading).values()) for reading in self.readings]
        return [candidate.language, candidate.variant, dict(candidate.config), self.detail,
                self.status, self.samples, readings]  # fmt: skip


class Race:
    """One problem on one rank: our arrays, the peers, and the clock. ``ended`` are the contestants
    that ended an earlier attempt."""

    def __init__(
        self, group: Group, entry: Entry, problem: Problem, seed: int, ended: list[list[Any]]
    ) -> None:
        self.group, self.entry, self.problem, self.ended = group, entry, problem, ended
        self.prepared = shares.prepare(entry, problem, group, group.rank, seed, group.share)
        self.stream = group.xp.cuda.Stream(non_blocking=True)
        self.start, self.end = group.xp.cuda.Event(), group.xp.cuda.Event()
        self.failed: list[Contestant] = []
        self.left_out: str | None = None
        group.meet()

    def announce(self, candidate: Candidate) -> bool:
        """Say on standard error that the candidate comes next; False if it is to be left out."""
        if _names(candidate) in self.ended:
            return False
        if self.group.rank == 0:
            print(ANNOUNCED + json.dumps(_names(candidate)), file=sys.stderr, flush=True)
        return True

    def contestants(
        self, implementations: Sequence[Implementation], has_peers: bool
    ) -> list[Contestant]:
        """The best configuration of each variant, and the peers; wrong ones are left out."""
        found: list[Contestant] = []
        for implementation in implementations:
            screened: list[Contestant] = []
            for config in implementation.configs(self.problem, self.group.gpu):
                candidate = Candidate.of(implementation, config)
                if not self.announce(candidate):
                    continue
                bind = self.group.try_load(implementation, self.problem, config)
                if isinstance(bind, str):
                    self.failed.append(Contestant(candidate, None, bind, "compile_error"))
                    continue
                verdict = self.prepared.verify(bind)
                self.group.synchronize()  # what failed here is not for the next to answer for
                run = bind(self.prepared.arrays)
                self._screen(Contestant(candidate, run, verdict.detail), screened)
            found += sorted(screened, key=lambda each: each.us)[:1]
        if has_peers:
            found += self._peers()
        for contestant in found:
            self.announce(contestant.candidate)
            nodes = round(LONG_US / contestant.us)
            self._capture(contestant, min(max(nodes, SHORT), MAX_NODES))
        return found

    def _peers(self) -> list[Contestant]:
        if self.group.shares_gpus:
            self.left_out = "NCCL and torch need a GPU for each rank"
            return []
        found: list[Contestant] = []
        tensors = views.tensors(self.prepared.entry, self.problem, self.prepared.arrays)
        peers = Peers(self.group, self.stream)
        for name, make in PEERS[self.entry.name].items():
            if not self.announce(Candidate(PEER, name)):
                continue
            self.prepared.reset()
            self.group.meet()
            contestant = Contestant(Candidate(PEER, name), None)
            try:
                contestant.run, is_right = make(peers, tensors, self.prepared.expected)
                self.group.device.synchronize()
                contestant.run()
                self.group.device.synchronize()
                contestant.detail = "" if is_right() else "far from the oracle"
                self._capture(contestant, 1)
            except (RuntimeError, AttributeError) as error:  # torch lacks it, or refuses
                contestant.detail = str(error).partition("\n")[0]
            self._screen(contestant, found)
        return found

    def _screen(self, contestant: Contestant, found: list[Contestant]) -> None:
        """Time a contestant that was right on every rank and add it to ``found``."""
        details, _ = self.group.rendezvous.gather(contestant.detail)
        contestant.detail = by_rank(details)
        if contestant.detail:
            self.failed.append(contestant)
            return
        self._capture(contestant, SHORT)
        for target_us in (0.0, SCREEN_US):
            contestant.us = self.time(contestant, target_us)
        found.append(contestant)

    def _capture(self, contestant: Contestant, nodes: int) -> None:
        assert contestant.run is not None
        with self.stream:
            self.stream.begin_capture()
            try:
                for _ in range(nodes):
                    contestant.run()
            finally:
                contestant.graph, contestant.nodes = self.stream.end_capture(), nodes

    def time(self, contestant: Contestant, target_us: float) -> float:
        """Microseconds of a run in replays of about ``target_us``; the same on all ranks."""
        replays = contestant.replays(target_us) if target_us else 1
        self.group.synchronize()
        self.start.record(self.stream)
        for _ in range(replays):
            contestant.graph.launch(self.stream)
        self.end.record(self.stream)
        self.group.synchronize()  # as above
        elapsed_ms = float(self.group.xp.cuda.get_elapsed_time(self.start, self.end))
        of_ranks, _ = self.group.rendezvous.gather(elapsed_ms)
        run_ms = max(of_ranks) if self.entry.one_sided else min(of_ranks)
        return float(run_ms) * 1e3 / (replays * contestant.nodes)


def on_rank(group: Group, job: Mapping[str, Any]) -> dict[str, Any]:
    """A race of all ranks: the ``contestants``, the ``environment``, and what is ``left_out``."""
    os.environ.update(NO_MULTICAST)  # before any library reads it
    entry = catalog.entry(job["entry"])
    problem = entry.problem(**job["problem"])
    race = Race(group, entry, problem, job["seed"], job.get("left_out", []))
    implementations = [catalog.implementation(entry.name, *names)
                       for names in job["implementations"]]  # fmt: skip
    contestants, dice = race.contestants(implementations, job["peers"]), random.Random(job["seed"])
    with telemetry.sampler(group.pci_bus_id) as sampler:
        for _ in range(BLOCKS):
            for contestant in dice.sample(contestants, len(contestants)):
                race.announce(contestant.candidate)
                contestant.samples.append(race.time(contestant, BLOCK_US))
                contestant.readings += filter(None, [sampler.read()])
    return {
        "environment": Environment.capture(group.machine, group.device.index).to_json(),
        "contestants": [each.to_json() for each in (*contestants, *race.failed)],
        "left_out": race.left_out,
    }
