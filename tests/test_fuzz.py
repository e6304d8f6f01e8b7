"""Fuzzing: what is drawn, and that a planted fault is found and shrunk."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from kernelcat import catalog, fuzz, gpu
from kernelcat.implementation import Config, Implementation
from kernelcat.spec import Problem

TILE = 16


def host(body) -> SimpleNamespace:
    """A device whose every implementation is the Python function ``body(problem, arrays)``."""
    return SimpleNamespace(
        xp=np,
        gpu=gpu.find("h200"),
        synchronize=lambda: None,
        load=lambda implementation, problem, config: lambda arrays: lambda: body(problem, arrays),
    )


def planted() -> Implementation:
    """A copy with one configuration."""
    model = catalog.in_language("tma_copy", "cuda")[0]
    return replace(
        model,
        variant="planted",
        space={"tile": (TILE,)},
        reject=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(tile=TILE),
    )


def right(problem: Problem, arrays: dict) -> None:
    arrays["dst"][...] = arrays["src"]


def forgets_the_tail(problem: Problem, arrays: dict) -> None:
    whole = problem["cols"] // TILE * TILE
    arrays["dst"][:, :whole] = arrays["src"][:, :whole]


def test_a_right_implementation_passes_as_many_examples_as_asked() -> None:
    result = fuzz.fuzz(planted(), host(right), 60)
    assert result.failure is None and result.examples >= 60


def test_a_forgotten_tail_is_found_and_shrunk_to_one_element() -> None:
    result = fuzz.fuzz(planted(), host(forgets_the_tail), 200)
    assert result.failure is not None
    assert (result.failure.problem["rows"], result.failure.problem["cols"]) == (1, 1)


def test_an_implementation_that_serves_nothing_passes_nothing() -> None:
    elsewhere = replace(planted(), archs=("sm_100a",))
    assert fuzz.fuzz(elsewhere, host(right), 20) == fuzz.FuzzResult(elsewhere.name, 0)


def test_the_same_seed_draws_the_same_examples() -> None:
    seen: list[list[str]] = [[], []]
    for draws in seen:
        fuzz.fuzz(planted(), host(lambda p, a, d=draws: (d.append(p.key), right(p, a))), 30)
    assert seen[0] == seen[1] and len(set(seen[0])) > 10


@pytest.mark.parametrize("name", catalog.names())
def test_drawn_problems_are_legal_and_within_the_limit(name: str) -> None:
    entry = catalog.entry(name)

    @settings(max_examples=100, deadline=None)
    @given(problem=fuzz.problems(entry, limit=50))
    def run(problem: Problem) -> None:
        assert entry.problem(**problem.values) == problem
        assert all(problem[a.name] <= 50 for a in entry.axes if not a.values)

    run()
