"""Search strategies: which candidates are screened, and for how long.

A strategy is a generator. It yields rounds of candidates, and is sent the times of the candidates
of the round (microseconds; candidates that failed are missing). The most promising candidates come
first. A strategy may get a limit of the number of candidates that it screens.
"""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import UnknownName, nearest
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune import tpe
from kernelcat.tune.candidate import Candidate

EFFORT_US = 20_000.0
"""Microseconds of GPU time for screening one candidate."""
MAX_EXHAUSTIVE = 256
"""The strategy ``auto`` is exhaustive up to this number of candidates; halving begins with at most
this number."""
SAMPLE_SIZE = 64
"""Number of candidates that the strategies ``random`` and ``tpe`` screen without a limit."""
REDUCTION = 3
"""Successive halving keeps one candidate in three, and times each of them three times as long."""
CLOSE_ESTIMATE = 1.15
"""Cost models do not tell configurations apart whose estimates are within this factor of the least
one."""


@dataclass(frozen=True)
class Round:
    """Candidates to screen next, with ``effort_us`` microseconds of GPU time for each."""

    candidates: Sequence[Candidate]
    effort_us: float = EFFORT_US


Times = Mapping[Candidate, float]
Search = Generator[Round, Times, None]
Strategy = Callable[[Sequence[Candidate], int | None], Search]


def exhaustive(candidates: Sequence[Candidate], limit: int | None = None) -> Search:
    """Every candidate once; with a limit, the most promising ones."""
    yield Round(candidates[:limit])


def random(candidates: Sequence[Candidate], limit: int | None = None) -> Search:
    """A random sample, drawn with a fixed seed."""
    draw = random_numbers.Random(0)
    yield Round(draw.sample(candidates, min(limit or SAMPLE_SIZE, len(candidates))))


def halving(candidates: Sequence[Candidate], limit: int | None = None) -> Search:
    """Successive halving: short timings of many candidates, then longer ones of fewer.

    Jamieson and Talwalkar, arXiv 1502.07943.
    """
    survivors: Sequence[Candidate] = candidates[: limit or MAX_EXHAUSTIVE]
    effort = EFFORT_US / REDUCTION**2
    while survivors:
        times = yield Round(survivors, effort)
        if effort >= EFFORT_US:
            return
        ranked = sorted((c for c in survivors if c in times), key=lambda c: times[c])
        survivors, effort = ranked[: -(-len(ranked) // REDUCTION)], effort * REDUCTION


def guided(candidates: Sequence[Candidate], limit: int | None = None) -> Search:
    """What a model of the times so far proposes; see :mod:`kernelcat.tune.tpe`."""
    batches = tpe.proposals(candidates, limit or SAMPLE_SIZE)
    batch = next(batches, None)
    while batch is not None:
        times = yield Round(batch)
        try:
            batch = batches.send(times)
        except StopIteration:
            return


STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "random": random,
    "halving": halving,
    "tpe": guided,
}


def strategy(name: str, candidates: Sequence[Candidate], limit: int | None = None) -> Search:
    """The search by strategy ``name``; ``auto`` is exhaustive for few candidates, else halving.

    At most ``limit`` candidates are screened.

    Raises
    ------
    UnknownName
        There is no such strategy.
    MissingDependency
        The strategy's library is not installed.
    """
    if name == "auto":
        name = "exhaustive" if len(candidates) <= MAX_EXHAUSTIVE else "halving"
    if name not in STRATEGIES:
        raise UnknownName(f"unknown strategy {name!r}{nearest(name, ['auto', *STRATEGIES])}")
    if name == "tpe":
        tpe.require()
    return STRATEGIES[name](candidates, limit)


def default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Config | None:
    """The default of ``implementation``; None if it is not worth a try for ``problem``."""
    if not implementation.serves(gpu.arch):
        return None
    config = implementation.default(problem, gpu)
    return config if implementation.why_not_try(config, problem, gpu) is None else None


def by_estimate(
    implementation: Implementation, problem: Problem, gpu: Gpu, legal: bool = False
) -> list[Config]:
    """The configurations worth a try for ``problem``, sorted by the estimate of the cost model.

    With ``legal``, all that can serve the problem.
    """
    return sorted(
        (implementation.legal if legal else implementation.configs)(problem, gpu),
        key=lambda config: (implementation.estimate(problem, config, gpu), config.key),
    )


def candidates(
    implementations: Sequence[Implementation], problem: Problem, gpu: Gpu, legal: bool = False
) -> list[Candidate]:
    """All candidates for ``problem``: defaults first, then the others by estimate.

    Candidates are worth a try; with ``legal``, all that can serve the problem.

    Among candidates whose estimates are within :data:`CLOSE_ESTIMATE` of the least one, those with
    values of parameters that no candidate before has come first: a search that ends early has then
    tried all values that may be the best.

    Implementations take turns, so that an early end of the search is fair to all. In each turn the
    implementation with the smallest estimate comes first, and a naive kernel that takes seconds
    comes last.
    """
    estimated = []
    for implementation in implementations:
        first = default(implementation, problem, gpu)
        ranked = by_estimate(implementation, problem, gpu, legal)
        queue = ([first] if first is not None else []) + [c for c in ranked if c != first]
        if queue:
            estimates = [implementation.estimate(problem, config, gpu) for config in queue]
            best = min(estimates)
            num_close = sum(us <= CLOSE_ESTIMATE * best for us in estimates)
            queue = varied(queue[:num_close]) + queue[num_close:]
            estimated.append((best, [Candidate.of(implementation, config) for config in queue]))
    queues = [queue for _, queue in sorted(estimated, key=lambda pair: pair[0])]
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def varied(configs: Sequence[Config]) -> list[Config]:
    """``configs``, the first one first, then those that have the most values not seen before.

    Configurations without a new value follow in their order.
    """
    chosen, rest = list(configs[:1]), list(configs[1:])
    seen = set(configs[0].items()) if configs else set()
    while rest:
        new = [len(set(config.items()) - seen) for config in rest]
        if not (most := max(new)):
            break
        config = rest.pop(new.index(most))
        chosen.append(config)
        seen |= set(config.items())
    return chosen + rest
