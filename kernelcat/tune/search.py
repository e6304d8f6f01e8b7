"""Which candidates are tried, and how long each is looked at.

A strategy is a generator: it yields rounds of candidates and is sent their times (microseconds;
failed ones are missing). Candidates come with the most promising first.
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
"""GPU time spent on screening one candidate."""
SMALL = 256
"""Up to this many candidates are tried one and all."""
SAMPLE = 64
"""How many the random strategy draws."""
RUNG = 3
"""Successive halving keeps one in three, and looks at it three times as long."""


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
    """A sample, the same one every time."""
    draw = random_numbers.Random(0)
    yield Round(draw.sample(candidates, min(SAMPLE, len(candidates))))


def halving(candidates: Sequence[Candidate]) -> Search:
    """Successive halving: a glance at the most promising, longer looks at ever fewer."""
    kept: Sequence[Candidate] = candidates[:SMALL]
    effort = EFFORT_US / RUNG**2
    while kept:
        times = yield Round(kept, effort)
        if effort >= EFFORT_US:
            return
        ranked = sorted((c for c in kept if c in times), key=lambda c: times[c])
        kept, effort = ranked[: -(-len(ranked) // RUNG)], effort * RUNG


STRATEGIES: dict[str, Strategy] = {
    "exhaustive": exhaustive,
    "random": random,
    "halving": halving,
}


def strategy(name: str, candidates: Sequence[Candidate]) -> Search:
    """The search called ``name``; ``auto`` is exhaustive where that is quick, else halving."""
    if name == "auto":
        name = "exhaustive" if len(candidates) <= SMALL else "halving"
    if name not in STRATEGIES:
        raise UnknownName(f"unknown strategy {name!r}{nearest(name, ['auto', *STRATEGIES])}")
    return STRATEGIES[name](candidates)


def default(implementation: Implementation, problem: Problem, gpu: Gpu) -> Config | None:
    """The implementation's default where it serves ``problem`` on ``gpu``, else None."""
    if not implementation.serves(gpu.arch):
        return None
    config = implementation.default(problem, gpu)
    return config if implementation.why_not(config, problem, gpu) is None else None


def by_estimate(implementation: Implementation, problem: Problem, gpu: Gpu) -> list[Config]:
    """Every configuration that serves ``problem``, the fastest by the model first."""
    return sorted(
        implementation.configs(problem, gpu),
        key=lambda config: (implementation.estimate(problem, config, gpu), config.key),
    )


def candidates(
    implementations: Sequence[Implementation], problem: Problem, gpu: Gpu
) -> list[Candidate]:
    """Everything that serves ``problem``: defaults first, then the rest by estimated time.

    Implementations take turns, so that a search cut short was fair to each; in each turn the one
    with the best estimate is first, and a naive kernel that takes seconds last.
    """
    estimated = []
    for implementation in implementations:
        first = default(implementation, problem, gpu)
        ranked = by_estimate(implementation, problem, gpu)
        queue = ([first] if first is not None else []) + [c for c in ranked if c != first]
        if queue:
            best = implementation.estimate(problem, ranked[0], gpu)
            estimated.append((best, [Candidate.of(implementation, config) for config in queue]))
    queues = [queue for _, queue in sorted(estimated, key=lambda pair: pair[0])]
    longest = max(map(len, queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]
