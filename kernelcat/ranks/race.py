"""Races of entries of several ranks with NCCL and torch's symmetric memory, in CUDA graphs.

Contestants run in interleaved blocks. A block replays a graph of one contestant on all ranks, which
begin together; its time is that of the slowest rank. A time holds everything that a node of the
graph costs, launch included. Inputs stay where they are, so small ones are in L2.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from kernelcat import catalog
from kernelcat.bench import peers as views
from kernelcat.bench.stats import median_interval
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.ranks import processes, shares
from kernelcat.ranks.group import Group
from kernelcat.ranks.torch_peers import NO_MULTICAST, PEERS, Peers
from kernelcat.runtime.device import Run
from kernelcat.verify import gate

NODES = 20
"""Runs in a graph."""
SCREEN_US, BLOCK_US = 500.0, 3000.0
"""Microseconds of the time that decides among the configurations of a variant, and of a block."""
BLOCKS = 21
LIMIT_S = 600.0
"""Seconds after which the ranks of one race count as hung."""


def run(entry: Entry, problems: Sequence[Problem], gpus: Sequence[int]) -> list[dict[str, Any]]:
    """Race the implementations of ``entry`` with peers; a row for each contestant of a problem.

    The ranks take ``gpus`` in turn. Raises ``RankFailed``.
    """
    rows: list[dict[str, Any]] = []
    for problem in problems:
        used = list(islice(cycle(gpus), problem[str(entry.ranks)]))
        job = {"verb": "race", "entry": entry.name, "problem": problem.values, "seed": 1}
        rows += processes.run(job, used, LIMIT_S)[0]
    return rows


@dataclass
class Contestant:
    """A captured run. ``estimate_us`` is the time of a run on the slowest rank."""

    name: str
    graph: Any
    config: str | None = None
    estimate_us: float = 0.0
    samples: list[float] = field(default_factory=list)


class Race:
    """One problem on one rank: our arrays, the peers, and the clock."""

    def __init__(self, group: Group, entry: Entry, problem: Problem, seed: int) -> None:
        self.group, self.entry, self.problem = group, entry, problem
        self.prepared = shares.prepare(entry, problem, group, group.rank, seed)
        self.stream = group.xp.cuda.Stream(non_blocking=True)
        self.start, self.end = group.xp.cuda.Event(), group.xp.cuda.Event()
        self.notes: list[dict[str, Any]] = []

    def contestants(self) -> list[Contestant]:
        """The best configuration of each variant, and the peers; wrong ones are left out."""
        found: list[Contestant] = []
        for implementation in catalog.implementations(self.entry.name):
            screened: list[Contestant] = []
            for config in implementation.configs(self.problem, self.group.gpu):
                bind = self.group.load(implementation, self.problem, config)
                verdict = self.prepared.verify(bind)
                contestant = Contestant(
                    implementation.name, self._captured(bind(self.prepared.arrays)), str(config)
                )
                self._screen(contestant, screened, verdict)
            found += sorted(screened, key=lambda each: each.estimate_us)[:1]
        return found + self._peers()

    def _peers(self) -> list[Contestant]:
        if self.group.shares_gpus:
            self.notes.append({"left_out": "NCCL and torch need a GPU for each rank"})
            return []
        found: list[Contestant] = []
        tensors = views.tensors(self.prepared.entry, self.problem, self.prepared.arrays)
        peers = Peers(self.group, self.stream)
        for name, make in PEERS.items():
            self.prepared.reset()
            run, result = make(peers, tensors)
            self.group.synchronize()
            run()
            self.group.synchronize()
            is_right = peers.is_close(result, self.prepared.expected["out"])
            verdict = gate.Verdict(is_right, 0.0, "" if is_right else "far from the oracle")
            self._screen(Contestant(name, self._captured(run)), found, verdict)
        return found

    def _screen(
        self, contestant: Contestant, found: list[Contestant], verdict: gate.Verdict
    ) -> None:
        """Time a contestant that was right on every rank and add it to ``found``, else note it."""
        details, _ = self.group.rendezvous.gather(verdict.detail)
        wrong = [f"rank {rank}: {detail}" for rank, detail in enumerate(details) if detail]
        if wrong:
            what = {"contestant": contestant.name, "config": contestant.config}
            self.notes.append({**what, "wrong": "; ".join(wrong)})
            return
        contestant.estimate_us = self.slowest(self.time(contestant, 1))
        replays = num_replays(contestant, SCREEN_US)
        contestant.estimate_us = self.slowest(self.time(contestant, replays))
        found.append(contestant)

    def _captured(self, run: Run) -> Any:
        with self.stream:
            self.stream.begin_capture()
            for _ in range(NODES):
                run()
            return self.stream.end_capture()

    def time(self, contestant: Contestant, replays: int) -> float:
        """Microseconds of a run on this rank; the ranks begin together."""
        self.group.synchronize()
        self.start.record(self.stream)
        for _ in range(replays):
            contestant.graph.launch(self.stream)
        self.end.record(self.stream)
        self.end.synchronize()
        elapsed_ms = self.group.xp.cuda.get_elapsed_time(self.start, self.end)
        return float(elapsed_ms) * 1e3 / (replays * NODES)

    def slowest(self, us: float) -> float:
        """The longest time of all ranks."""
        return float(max(self.group.rendezvous.gather(us)[0]))


def num_replays(contestant: Contestant, target_us: float) -> int:
    """Replays that fill ``target_us``; the same on all ranks, because the estimate is."""
    return max(1, round(target_us / (contestant.estimate_us * NODES)))


def on_rank(group: Group, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a race of all ranks."""
    os.environ.update(NO_MULTICAST)  # before any library reads it
    entry = catalog.entry(job["entry"])
    problem = entry.problem(**job["problem"])
    race = Race(group, entry, problem, job["seed"])
    contestants, dice = race.contestants(), random.Random(job["seed"])
    for _ in range(BLOCKS):
        for contestant in dice.sample(contestants, len(contestants)):
            replays = num_replays(contestant, BLOCK_US)
            contestant.samples.append(race.slowest(race.time(contestant, replays)))
    head = {
        "entry": entry.name,
        "problem": entry.problem_name(problem) or str(problem),
        "ranks": group.ranks,
        "topology": group.topology,
        "gpu": group.gpu.name,
    }
    return [{**head, **_row(each)} for each in contestants] + [{**head, **n} for n in race.notes]


def _row(contestant: Contestant) -> dict[str, Any]:
    interval = median_interval(contestant.samples)
    return {
        "contestant": contestant.name,
        "config": contestant.config,
        "regime": "graph",
        "median_us": round(interval.median, 3),
        "ci_us": [round(interval.low, 3), round(interval.high, 3)],
        "samples": len(contestant.samples),
    }
