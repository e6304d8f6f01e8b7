"""Races of entries of several ranks with NCCL and torch's symmetric memory, in CUDA graphs.

Contestants run in interleaved blocks. A block replays a graph of one contestant on all ranks, which
begin together; its time is that of the rank that began last, because the others wait for it. A time
holds everything that a node of the graph costs, launch included. Inputs stay where they are, so
small ones are in L2.
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

SHORT, LONG_US, MAX_NODES = 10, 1000.0, 500
"""Runs in a graph that is screened; microseconds that a raced graph takes, long beside the gap
between two replays; and the most runs in it."""
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
    """A run and the graph of ``nodes`` such runs. ``us`` is its time so far."""

    name: str
    run: Run | None
    config: str | None = None
    graph: Any = None
    nodes: int = SHORT
    us: float = 0.0
    samples: list[float] = field(default_factory=list)

    def replays(self, target_us: float) -> int:
        """Replays that fill ``target_us``: as many on every rank, because ``us`` is the same."""
        return max(1, round(target_us / (self.us * self.nodes)))


class Race:
    """One problem on one rank: our arrays, the peers, and the clock."""

    def __init__(self, group: Group, entry: Entry, problem: Problem, seed: int) -> None:
        self.group, self.entry, self.problem = group, entry, problem
        self.prepared = shares.prepare(entry, problem, group, group.rank, seed)
        self.stream = group.xp.cuda.Stream(non_blocking=True)
        self.start, self.end = group.xp.cuda.Event(), group.xp.cuda.Event()
        self.notes: list[dict[str, Any]] = []
        group.meet()

    def contestants(self) -> list[Contestant]:
        """The best configuration of each variant, and the peers; wrong ones are left out."""
        found: list[Contestant] = []
        for implementation in catalog.implementations(self.entry.name):
            screened: list[Contestant] = []
            for config in implementation.configs(self.problem, self.group.gpu):
                bind = self.group.load(implementation, self.problem, config)
                verdict = self.prepared.verify(bind)
                run = bind(self.prepared.arrays)
                contestant = Contestant(implementation.name, run, str(config))
                self._screen(contestant, screened, verdict)
            found += sorted(screened, key=lambda each: each.us)[:1]
        found += self._peers()
        for contestant in found:
            nodes = round(LONG_US / contestant.us)
            self._capture(contestant, min(max(nodes, SHORT), MAX_NODES))
        return found

    def _peers(self) -> list[Contestant]:
        if self.group.shares_gpus:
            self.notes.append({"left_out": "NCCL and torch need a GPU for each rank"})
            return []
        found: list[Contestant] = []
        tensors = views.tensors(self.prepared.entry, self.problem, self.prepared.arrays)
        peers = Peers(self.group, self.stream)
        for name, make in PEERS[self.entry.name].items():
            self.prepared.reset()
            self.group.meet()
            run, detail = None, ""
            try:
                run, is_right = make(peers, tensors, self.prepared.expected)
                self.group.device.synchronize()
                run()
                self.group.device.synchronize()
                detail = "" if is_right() else "far from the oracle"
                self._capture(Contestant(name, run), 1)
            except (RuntimeError, AttributeError) as error:  # torch lacks it, or refuses
                detail = str(error).partition("\n")[0]
            verdict = gate.Verdict(not detail, 0.0, detail)
            self._screen(Contestant(name, run), found, verdict)
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
        self.end.synchronize()
        elapsed_ms = float(self.group.xp.cuda.get_elapsed_time(self.start, self.end))
        return min(self.group.rendezvous.gather(elapsed_ms)[0]) * 1e3 / (replays * contestant.nodes)


def on_rank(group: Group, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a race of all ranks."""
    os.environ.update(NO_MULTICAST)  # before any library reads it
    entry = catalog.entry(job["entry"])
    problem = entry.problem(**job["problem"])
    race = Race(group, entry, problem, job["seed"])
    contestants, dice = race.contestants(), random.Random(job["seed"])
    for _ in range(BLOCKS):
        for contestant in dice.sample(contestants, len(contestants)):
            contestant.samples.append(race.time(contestant, BLOCK_US))
    head = {
        "entry": entry.name,
        "problem": entry.problem_name(problem) or str(problem),
        "ranks": group.ranks,
        "topology": group.machine.sku,
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
