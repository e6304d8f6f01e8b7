"""Checks of implementations of entries of several ranks, on processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, groupby, islice
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError
from kernelcat.ranks import processes, shares
from kernelcat.ranks.group import Group
from kernelcat.runtime.device import Run
from kernelcat.verify import gate
from kernelcat.verify.certify import CHECKED_S, Outcome
from kernelcat.verify.seeds import draw_seeds

GRAPH_RUNS, REPLAYS = 3, 2
"""Runs in a CUDA graph, and its replays: an odd number, so that a replay begins with either half of
the windows."""


def run(
    implementations: Sequence[Implementation], problems: Sequence[str], gpus: Sequence[int]
) -> Iterator[tuple[Implementation, Outcome]]:
    """Check implementations one after the other, each on as many processes as it has ranks.

    ``problems`` are names; all where empty. The ranks take ``gpus`` in turn, and share them where
    there are more ranks.
    """
    for implementation in implementations:
        entry, outcome = catalog.entry(implementation.entry), Outcome(implementation.name)
        chosen = [entry.named(name) for name in problems] or list(entry.problems.values())

        def ranks_of(problem: Problem, axis: Any = entry.ranks) -> int:
            return int(problem[axis])

        for ranks, some in groupby(sorted(chosen, key=ranks_of), ranks_of):
            _check(implementation, list(some), list(islice(cycle(gpus), ranks)), outcome)
        yield implementation, outcome


def _check(
    implementation: Implementation,
    problems: Sequence[Problem],
    gpus: Sequence[int],
    outcome: Outcome,
) -> None:
    """Check ``problems`` of one number of ranks, and add the results to ``outcome``."""
    names = (implementation.entry, implementation.language, implementation.variant)
    job = {"verb": "check", "implementation": names, "problems": [p.values for p in problems],
           "seeds": draw_seeds(2)}  # fmt: skip
    try:
        results = processes.run(job, gpus, CHECKED_S)
    except KernelcatError as error:
        outcome.failures.append(str(error))
        return
    for problem, verdicts in zip(problems, zip(*results, strict=True), strict=True):
        name = catalog.entry(problem.entry).problem_name(problem) or str(problem)
        wrong = [f"rank {rank}: {v['wrong']}" for rank, v in enumerate(verdicts) if "wrong" in v]
        if "skipped" in verdicts[0]:
            outcome.skipped.append(f"{name}: {verdicts[0]['skipped']}")
        elif wrong:
            outcome.failures.append(f"{name} {verdicts[0]['config']}: {'; '.join(wrong)}")
        else:
            outcome.problems.append(name)


def on_rank(group: Group, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """This rank's verdicts on the problems of ``job``, in their order."""
    implementation = catalog.implementation(*job["implementation"])
    entry, verdicts = catalog.entry(implementation.entry), []
    for axes in job["problems"]:
        problem = entry.problem(**axes)
        config = implementation.default(problem, group.gpu)
        reason = implementation.why_not(config, problem, group.gpu)
        verdict = {"skipped": reason} if reason else _judge(
            group, implementation, problem, config, job["seeds"]
        )  # fmt: skip
        verdicts.append({**verdict, "config": str(config)})
    return verdicts


def _judge(
    group: Group,
    implementation: Implementation,
    problem: Problem,
    config: Config,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """``wrong`` with the first wrong result of this rank, or nothing; single runs, and graphs."""
    entry, bind = catalog.entry(implementation.entry), group.load(implementation, problem, config)
    wrong: dict[str, Any] = {}
    for number, seed in enumerate(seeds):
        prepared = shares.prepare(entry, problem, group, group.rank, seed)
        group.meet()
        single = bind(prepared.arrays)
        runs: dict[str, Run] = {"": single, "in a graph, ": _captured(single, group)}
        for place, each in runs.items():
            verdict = prepared.verify_run(each, poison=gate.BANDS[number % len(gate.BANDS)])
            if not verdict.passed:
                wrong.setdefault("wrong", f"{place}seed {seed}: {verdict.detail}")
    return wrong


def _captured(run: Run, group: Group) -> Run:
    """Replays of a CUDA graph of several runs; the ranks' replays are launched together."""
    stream = group.xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for _ in range(GRAPH_RUNS):
            run()
        graph = stream.end_capture()

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.launch(stream)

    return replay
