"""Checks of implementations of entries of several ranks, on processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle, groupby, islice
from typing import Any

from kernelcat import catalog
from kernelcat.catalog.digest import digest
from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import KernelcatError, RankFailed
from kernelcat.ranks import processes, sanitize, shares
from kernelcat.ranks.group import Group
from kernelcat.ranks.mirrored import MirroredGroup
from kernelcat.ranks.rendezvous import by_rank
from kernelcat.runtime.device import CudaDevice, Run
from kernelcat.runtime.environment import Environment
from kernelcat.verify import gate
from kernelcat.verify.certify import CHECKED_S, Outcome
from kernelcat.verify.fuzz import KERNELS, MAX_JOBS, announce, fuzz
from kernelcat.verify.gate import Verdict
from kernelcat.verify.receipts import Receipt
from kernelcat.verify.sanitizer import SANITIZED_SIZE
from kernelcat.verify.seeds import draw_seeds

GRAPH_RUNS, REPLAYS = 3, 2
"""Runs in a CUDA graph, and its replays: an odd number, so that a replay begins with either half of
the windows."""
SANITIZED_KERNELS = 6
"""Combinations of configuration and choices that a sanitized run draws from."""


@dataclass(frozen=True)
class Fuzzing:
    """What is drawn: arguments of :func:`kernelcat.verify.fuzz.fuzz`.

    With ``mirrored`` arrays are on the host (:class:`~kernelcat.ranks.mirrored.MirroredGroup`).
    """

    examples: int
    random_seed: int = 0
    limit: int | None = None
    kernels: int = KERNELS
    mirrored: bool = False


@dataclass(frozen=True)
class Sanitizing:
    """Random problems for each compute-sanitizer tool, and the tools; some may be left out."""

    examples: int
    tools: Sequence[str] = sanitize.TOOLS


@dataclass(frozen=True)
class Checked:
    """The outcome of a check; ``environment`` is that of the machine, None where no rank began."""

    implementation: Implementation
    outcome: Outcome
    environment: Mapping[str, Any] | None

    def receipt(self) -> Receipt:
        """The receipt for an outcome that is right; its GPU is the machine: ``h200x2-nvlink``."""
        assert self.environment is not None
        return Receipt(
            implementation=self.implementation.name,
            source=digest(self.implementation),
            gpu=self.environment["sku"],
            environment=self.environment,
            problems=tuple(self.outcome.problems),
            fuzz_examples=self.outcome.fuzz_examples,
            sanitizer=self.outcome.sanitizer,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def run(
    implementations: Sequence[Implementation],
    problems: Sequence[str],
    gpus: Sequence[int],
    fuzzing: Fuzzing | None = None,
    sanitizing: Sanitizing | None = None,
) -> Iterator[Checked]:
    """Check implementations one after the other, each on as many processes as it has ranks.

    ``problems`` are names; all where empty. The ranks take ``gpus`` in turn, and share them where
    there are more ranks. There is an outcome for each number of ranks.
    """
    for implementation in implementations:
        entry = catalog.entry(implementation.entry)
        chosen = [entry.named(name) for name in problems] or list(entry.problems.values())

        def ranks_of(problem: Problem, axis: Any = entry.ranks) -> int:
            return int(problem[axis])

        for ranks, some in groupby(sorted(chosen, key=ranks_of), ranks_of):
            numbers = list(islice(cycle(gpus), ranks))
            checked = _check(implementation, list(some), numbers, fuzzing)
            if sanitizing and checked.outcome.passed:
                _sanitize(checked, numbers, sanitizing)
            yield checked


def run_fuzzing(
    implementations: Sequence[Implementation], gpus: Sequence[int], fuzzing: Fuzzing
) -> Iterator[Checked]:
    """Check random problems alone, with a rank for each of ``gpus``; two ranks share one GPU."""
    for implementation in implementations:
        yield _check(implementation, [], list(islice(cycle(gpus), max(2, len(gpus)))), fuzzing)


def _check(
    implementation: Implementation,
    problems: Sequence[Problem],
    gpus: Sequence[int],
    fuzzing: Fuzzing | None,
) -> Checked:
    """Check ``problems`` of one number of ranks, then random ones."""
    outcome = Outcome(implementation.name)
    try:
        results = processes.run(_job(implementation, problems, fuzzing), gpus, CHECKED_S)
    except KernelcatError as error:
        outcome.failures.append(str(error))
        return Checked(implementation, outcome, None)
    all_verdicts = zip(*(result["verdicts"] for result in results), strict=True)
    for problem, verdicts in zip(problems, all_verdicts, strict=True):
        name = catalog.entry(problem.entry).problem_name(problem) or str(problem)
        wrong = by_rank([verdict.get("wrong", "") for verdict in verdicts])
        if "skipped" in verdicts[0]:
            outcome.skipped.append(f"{name}: {verdicts[0]['skipped']}")
        elif wrong:
            outcome.failures.append(f"{name} {verdicts[0]['config']}: {wrong}")
        else:
            outcome.problems.append(name)
    first = results[0]
    outcome.fuzz_examples = first["examples"]
    outcome.failures += [first["failure"]] if first["failure"] else []
    return Checked(implementation, outcome, first["environment"])


def _job(
    implementation: Implementation, problems: Sequence[Problem], fuzzing: Fuzzing | None
) -> dict[str, Any]:
    """What the process of each rank is told to do; see :func:`on_rank`."""
    names = (implementation.entry, implementation.language, implementation.variant)
    mirrored = fuzzing is not None and fuzzing.mirrored
    return {"verb": "check", "implementation": names, "problems": [p.values for p in problems],
            "seeds": draw_seeds(2), "fuzzing": fuzzing and vars(fuzzing), "mirrored": mirrored,
            "slowness": sanitize.SLOWNESS}  # fmt: skip


def _sanitize(checked: Checked, gpus: Sequence[int], sanitizing: Sanitizing) -> None:
    """Run the tools over a small fuzz run of what was right, and note what they found."""
    fuzzing = Fuzzing(
        sanitizing.examples, limit=SANITIZED_SIZE, kernels=SANITIZED_KERNELS, mirrored=True
    )
    outcome, job = checked.outcome, _job(checked.implementation, [], fuzzing)
    tools = [tool for tool in sanitizing.tools if tool in sanitize.TOOLS]
    outcome.left_out = {tool: reason for tool, reason in sanitize.LEFT_OUT.items()
                        if tool in sanitizing.tools}  # fmt: skip
    try:
        outcome.add(sanitize.sanitize(job, gpus, tools))
    except KernelcatError as error:
        outcome.failures.append(str(error))


def on_rank(group: Group, job: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's ``verdicts`` on the problems of ``job``, in their order, and what random ones
    gave: the number of ``examples`` that passed on all ranks, and a ``failure`` or None."""
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
    drawn = {"examples": 0, "failure": None}
    if job["fuzzing"]:
        drawn = _fuzz(group, implementation, Fuzzing(**job["fuzzing"]))
    environment = Environment.capture(group.machine, group.device.index).to_json()
    return {"verdicts": verdicts, **drawn, "environment": environment}


class _GroupEnded(BaseException):
    """Ranks cannot go on: no example that Hypothesis may shrink."""


def _fuzz(group: Group, implementation: Implementation, fuzzing: Fuzzing) -> dict[str, Any]:
    """Check random problems, which all ranks draw alike: they agree on each verdict."""

    def judge(problem: Problem, config: Config, draw: int) -> Verdict:
        try:
            if isinstance(group, MirroredGroup):
                announce(implementation, problem, config, group.gpu)
            wrong = _judge(group, implementation, problem, config, [draw]).get("wrong", "")
            detail = by_rank(group.rendezvous.gather(wrong)[0])
        except Exception as error:
            what = f"{implementation.name} {problem} {config}: {type(error).__name__}: {error}"
            raise _GroupEnded(what) from error
        return Verdict(not detail, float("nan"), detail)

    axis = str(catalog.entry(implementation.entry).ranks)
    compiles = group.rank == 0 and isinstance(group.device, CudaDevice)  # the others wait for it
    try:
        result = fuzz(
            implementation, group, fuzzing.examples, fuzzing.random_seed, fuzzing.limit,
            fuzzing.kernels, jobs=MAX_JOBS if compiles else None, fixed={axis: group.ranks},
            judge=judge,
        )  # fmt: skip
    except _GroupEnded as error:
        raise RankFailed(str(error)) from error
    failure = str(result.failure) if result.failure else None
    if not failure and not result.examples:
        failure = "the implementation serves none of the random problems"
    return {"examples": result.examples, "failure": failure}


def _judge(
    group: Group,
    implementation: Implementation,
    problem: Problem,
    config: Config,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """``wrong`` with the first wrong result of this rank, or nothing.

    There are single runs and graphs; runs of mirrored arrays, which are copied, are in no graph.
    """
    entry, bind = catalog.entry(implementation.entry), group.load(implementation, problem, config)
    wrong: dict[str, Any] = {}
    for number, seed in enumerate(seeds):
        prepared = shares.prepare(entry, problem, group, group.rank, seed, group.share)
        group.meet()
        single = bind(prepared.arrays)
        runs: dict[str, Run] = {"": single}
        if not isinstance(group, MirroredGroup):
            runs["in a graph, "] = _captured(single, group)
        for place, each in runs.items():
            verdict = prepared.verify_run(each, poison=gate.BANDS[number % len(gate.BANDS)])
            if not verdict.passed:
                wrong.setdefault("wrong", f"{place}seed {seed}: {verdict.detail}")
        group.unshare()
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
