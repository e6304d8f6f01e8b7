"""Search strategies: which candidates are screened, and for how long.

A strategy is a generator. It yields rounds of candidates, and is sent the times of the candidates
of the round (microseconds; candidates that failed are missing). The most promising candidates come
first.
"""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from kernelcat.catalog.implementation import Config, Implementation
from kernelcat.catalog.spec import Problem
from kernelcat.errors import UnknownName, nearest
from kernelcat.runtime.gpu import Gpu
from kernelcat.tune.candidate import Candidate

EFFORT_US = 20_000.0
"""Microseconds of GPU time for screening one candidate."""
MAX_EXHAUSTIVE = 256
"""The strategy ``auto`` is exhaustive up to this number of candidates; halving begins with at most
this number."""
SAMPLE_SIZE = 64
"""Number of candidates that the random strategy draws."""
REDUCTION = 3
"""Successive halving keeps one candidate in three, and times each of them three times as long."""


@dataclass(frozen=True)
class Round:
    """Candidates to screen next, with ``effort_us`` microseconds of GPU time for each."""

    candidates: Sequence[Candidate]
    effort_us: float = EFFORT_US


Times = Mapping[Candidate, float]
Search = Generator[Round, Times, None]
Strategy = Callable[[Sequence[Candidate]], Search]


def exhaustive(candidates: Sequence[Candidate]) -> Search:
    """Every candidate once."""
    yield Round(candidates)


def random(candidates: Sequence[Candidate]) -> Search:
    """A random sample, drawn with a fixed seed."""
    draw = random_numbers.Random(0)
    yield Round(draw.sample(candidates, min(SAMPLE_SIZE, len(candidates))))


def halving(candidates: Sequence[Candidate]) -> Search:
    """Successive halving: short timings of many candidates, then longer ones of fewer.

    Jamieson and Talwalkar, arXiv 1502.07943.
    """
    survivors: Sequence[Candidate] = candidates[:MAX_EXHAUSTIVE]
    effort = EFFORT_US / REDUCTION**2
    while survivors:
        times = yield Round(survivors, effort)
        if effort >= EFFORT_US:
            return
        ranked = sorted((c for c in survivors if c in times), key=lambda c: times[c])
        survivors, effort = ranked[: -(-len(ranked) // REDUCTION)], effort * REDUCTION


STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "random": random,
    "halving": halving,
}


def strategy(name: str, candidates: Sequence[Candidate]) -> Search:
    """The search by strategy ``name``; ``auto`` is exhaustive for few candidates, else halving."""
    if name == "auto":
        name = "exhaustive" if len(candidates) <= MAX_EXHAUSTIVE else "halving"
    if name not in STRATEGIES:
        raise UnknownName(f"unknown strategy {name!r}{nearest(name, ['auto', *STRATEGIES])}")
    return STRATEGIES[name](candidates)


def default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Config | None:
    """The default of ``implementation``; None if it is not worth a try for ``problem``."""
    if not implementation.serves(gpu.arch):
        return None
    config = implementation.default(problem, gpu)
    return config if implementation.why_not_try(config, problem, gpu) is None else None


def by_estimate(implementation: Implementation, problem: Problem, gpu: Gpu) -> list[Config]:
    """The configurations worth a try for ``problem``, sorted by the estimate of the cost model."""
    return sorted(
        implementation.configs(problem, gpu),
        key=lambda config: (implementation.estimate(problem, config, gpu), config.key),
    )


def candidates(
    implementations: Sequence[Implementation], problem: Problem, gpu: Gpu
) -> list[Candidate]:
    """All candidates for ``problem``: defaults first, then the others by estimate.

    Implementations take turns, so that an early end of the search is fair to all. In each turn the
    implementation with the smallest estimate comes first, and a naive kernel that takes seconds
    comes last.
    """
    estimated = []
    for implementation in implementations:
        first = default(implementation, problem, gpu)
        ranked = by_estimate(implementation, problem, gpu)
        queue = ([first] if first is not None else []) + [c for c in ranked if c != first]
        if queue:
            best = implementation.estimate(problem, (ranked or queue)[0], gpu)
            estimated.append((best, [Candidate.of(implementation, config) for config in queue]))
    queues = [queue for _, queue in sorted(estimated, key=lambda pair: pair[0])]
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
