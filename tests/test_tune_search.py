"""Search strategies, the order of candidates, tie-breaking, and predictions."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from statistics import median

import postgres
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.errors import MissingDependency
from kernelcat.runtime import gpu
from kernelcat.tune import search
from kernelcat.tune.candidate import Candidate, simplicity
from kernelcat.tune.cross import misfit, promising_candidates
from kernelcat.tune.cross_plan import LOOK_AHEAD
from kernelcat.tune.messages import Built

H200 = gpu.find("h200")
PROBLEM = Problem.of("toy", n=1)


def toy(variant: str, sizes: tuple[int, ...], first: int) -> Implementation:
    """An implementation whose odd sizes are illegal, larger sizes faster, and default ``first``."""
    return Implementation(
        entry="toy",
        language="cuda",
        variant=variant,
        summary="",
        archs=("sm_90a",),
        space={"size": sizes},
        illegal=lambda config, problem, gpu: "odd" if config["size"] % 2 else None,
        default=lambda problem, gpu: Config(size=first),
        program=lambda problem, config, gpu: Program(()),
        estimate=lambda problem, config, gpu: 1000.0 / config["size"],
    )


def drive(
    name: str, candidates: list[Candidate], time_of, limit: int | None = None
) -> list[search.Round]:
    """The rounds of a strategy; ``time_of`` is the time of a candidate, None where it fails."""
    search_rounds, rounds = search.strategy(name, candidates, limit), []
    step = next(search_rounds, None)
    while step is not None:
        rounds.append(step)
        try:
            step = search_rounds.send(
                {c: t for c in step.candidates if (t := time_of(c)) is not None}
            )
        except StopIteration:
            break
    return rounds


def pool(count: int) -> list[Candidate]:
    return [Candidate("cuda", "v", Config(i=i)) for i in range(count)]


def test_candidates_take_turns_defaults_first_then_by_estimate() -> None:
    both = [toy("a", (2, 3, 4, 8), 4), toy("b", (2, 16), 2)]
    order = search.candidates(both, PROBLEM, H200)
    assert [(c.variant, c.config["size"]) for c in order] == [
        ("b", 2), ("a", 4), ("b", 16), ("a", 8), ("a", 2)
    ]  # fmt: skip
    assert search.candidates(both, PROBLEM, gpu.find("a100")) == []


def test_candidates_close_by_estimate_come_with_new_values_first() -> None:
    """Both parameters cost nothing but for a few values, which the model puts far behind."""
    costs = {("a", 3): 1.0, ("b", 9): 0.2}
    two = replace(
        toy("v", (2,), 2),
        space={"a": (1, 2, 3), "b": (7, 8, 9)},
        illegal=lambda config, problem, gpu: None,
        default=lambda problem, gpu: Config(a=1, b=7),
        estimate=lambda problem, config, gpu: (
            100 + config["a"] + 100 * sum(costs.get(item, 0) for item in config.items())
        ),
    )
    order = [(c.config["a"], c.config["b"]) for c in search.candidates([two], PROBLEM, H200)]
    assert order == [(1, 7), (2, 8), (1, 8), (2, 7), (1, 9), (2, 9), (3, 7), (3, 8), (3, 9)]
    assert search.varied([]) == []


def test_an_implementation_without_a_promising_configuration_is_left_out() -> None:
    """Its default is legal, and the search finds nothing worth a try beside it either."""
    hopeless = replace(toy("hopeless", (2, 4), 4), unpromising=lambda config, problem, gpu: "slow")
    assert search.candidates([hopeless], PROBLEM, H200) == []
    others = search.candidates([hopeless, toy("v", (2,), 2)], PROBLEM, H200)
    assert [candidate.variant for candidate in others] == ["v"]


@given(st.integers(0, 200))
def test_exhaustive_screens_every_candidate_once(count) -> None:
    rounds = drive("exhaustive", pool(count), lambda c: 1.0)
    assert [c for step in rounds for c in step.candidates] == pool(count)


@given(st.integers(1, 200))
def test_random_draws_the_same_sample_every_time(count) -> None:
    first, second = (drive("random", pool(count), lambda c: 1.0) for _ in range(2))
    assert first == second and len(set(first[0].candidates)) == min(count, search.SAMPLE_SIZE)


@given(st.lists(st.one_of(st.none(), st.floats(1, 1e6)), min_size=1, max_size=100))
def test_halving_times_fewer_candidates_longer_and_keeps_the_best(times) -> None:
    rounds = drive("halving", pool(len(times)), lambda c: times[c.config["i"]])
    sizes = [len(step.candidates) for step in rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert [step.effort_us for step in rounds] == sorted(step.effort_us for step in rounds)
    known = [t for t in times if t is not None]
    if known:
        assert rounds[-1].effort_us == search.EFFORT_US
        assert min(known) in [times[c.config["i"]] for c in rounds[-1].candidates]


def test_auto_is_exhaustive_for_few_candidates_only() -> None:
    assert len(drive("auto", pool(search.MAX_EXHAUSTIVE), lambda c: 1.0)) == 1
    assert len(drive("auto", pool(search.MAX_EXHAUSTIVE + 1), lambda c: 1.0)) == 3


@pytest.mark.parametrize("name", search.STRATEGIES)
@pytest.mark.parametrize("limit", [1, 20, 500])
def test_a_limit_holds_for_every_strategy_and_none_repeats_itself(name, limit) -> None:
    postgres.require("optuna")
    rounds = drive(name, pool(100), lambda c: 1.0 + c.config["i"], limit)
    screened = [c for step in rounds for c in step.candidates]
    assert len(set(screened)) == min(limit, 100)
    assert name == "halving" or len(screened) == len(set(screened))
    assert rounds == drive(name, pool(100), lambda c: 1.0 + c.config["i"], limit)


def test_the_model_finds_what_the_cost_model_puts_last() -> None:
    """A space of 1,000 with one good value of each of three parameters, and half of it failing."""
    postgres.require("optuna")
    sizes = range(10)
    space = [
        Candidate("cuda", variant, Config(a=a, b=b, c=c))
        for variant in ("v", "w") for a in sizes for b in sizes for c in sizes
        if variant == "v" or a + b < 4
    ]  # fmt: skip

    def time_of(candidate: Candidate) -> float | None:
        a, b, c = (candidate.config[name] for name in "abc")
        if c % 2:
            return None
        return 10.0 + abs(a - 8) + abs(b - 7) + 2 * (c != 6) + 5 * (candidate.variant == "w")

    guided, drawn = (
        [time_of(c) for step in drive(name, space, time_of, 120) for c in step.candidates]
        for name in ("tpe", "random")
    )
    assert min(filter(None, guided)) <= 11.0  # of 10 to 32
    late = guided[60:]  # proposed by the model
    assert median(filter(None, late)) < median(filter(None, drawn)) - 3


def test_without_optuna_the_error_names_what_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kernelcat\[search\]'"):
        search.strategy("tpe", ())


def test_a_candidate_has_the_same_hash_in_another_process() -> None:
    candidate = Candidate("triton", "tma", Config(BLOCK_M=128, persistent=True, order="row"))
    program = "import pickle, sys; pickle.dump(pickle.load(sys.stdin.buffer), sys.stdout.buffer)"
    other = subprocess.run([sys.executable, "-c", program], input=pickle.dumps({candidate: 1}),
                           stdout=subprocess.PIPE, check=True,
                           env=os.environ | {"PYTHONHASHSEED": "7"})  # fmt: skip
    assert pickle.loads(other.stdout)[candidate] == 1  # found by its hash
    assert str(candidate) == "triton/tma BLOCK_M=128 order=row persistent=True"


def test_ties_go_to_the_lower_rank_then_to_the_default() -> None:
    ranks, defaults = {("cuda", "a"): 0, ("cuda", "b"): 1}, {("cuda", "b"): Config(i=2)}
    order = [Candidate("cuda", "b", Config(i=1)), Candidate("cuda", "b", Config(i=2)),
             Candidate("cuda", "a", Config(i=9))]  # fmt: skip
    ranked = sorted(order, key=lambda c: simplicity(c, ranks, defaults))
    assert ranked == [order[2], order[1], order[0]]


def test_code_that_does_not_fit_the_gpu_fails_with_the_reason() -> None:
    def built(**metadata):
        return Built(({"registers": 255, **metadata},))

    assert misfit(built(spill_bytes=0, static_shared_bytes=1024), H200) is None
    assert misfit(built(spill_bytes=236), H200) is None
    assert "spills 400 bytes" in (misfit(built(spill_bytes=400), H200) or "")
    too_much = misfit(built(static_shared_bytes=1024, shared_bytes=H200.shared_bytes), H200)
    assert too_much is not None and "shared memory" in too_much


def test_a_cross_tune_looks_at_the_default_and_the_smallest_estimates() -> None:
    many = toy("a", tuple(range(2, 100)), 2)
    chosen = dict(promising_candidates(many, PROBLEM, H200))
    assert len(chosen) == 1 + LOOK_AHEAD
    assert next(iter(chosen)).config["size"] == 2
    assert max(c.config["size"] for c in chosen) == 98
