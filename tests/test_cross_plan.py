"""The order in which a cross-tune compiles, and what calls make of its predictions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import kernelcat
from kernelcat import catalog
from kernelcat.call.choice import choose
from kernelcat.catalog.implementation import Config
from kernelcat.reference.gemm import product
from kernelcat.runtime.gpu import SKUS
from kernelcat.store.snapshots import Choice
from kernelcat.tune.backend import Cuda
from kernelcat.tune.candidate import Candidate
from kernelcat.tune.cross import MAX_SPILL_BYTES, SLOW_SPILL_BYTES, misfit, spilled
from kernelcat.tune.cross_plan import CompileSeconds, Kind, Plan, Turn
from kernelcat.tune.messages import Built

B200, GB200 = SKUS["b200"], SKUS["gb200"]
GEMM, MLA = catalog.entry("gemm"), catalog.entry("flashmla")
SMALL, LARGE = product(64, 4096, 4096), product(4096, 4096, 4096)
FITS, SPILLS = Built(({"registers": 32},), 1.0), Built(({"spill_bytes": 900},), 1.0)


class Table:
    """A plan whose candidates are numbers; ``code`` maps a number to what it is compiled from."""

    def __init__(self, estimates, code=None, spilling=(), cached=()) -> None:
        self.code, self.spilling = code or {}, set(spilling)
        self.turns = [
            Turn(problem, SimpleNamespace(name=f"gemm/cuda/{name}", language="cuda", variant=name),
                 [(self.candidate(name, n), us) for n, us in each.items()])
            for (name, problem), each in estimates.items()
        ]  # fmt: skip
        self.judged, self.jobs = [], []
        self.plan = Plan(
            GEMM, self.turns, self._code,
            lambda turn, c: FITS if c.config["n"] in cached else None,
            self._judge,
        )  # fmt: skip

    @staticmethod
    def candidate(name: str, number: int) -> Candidate:
        return Candidate("cuda", name, Config(n=number))

    def _code(self, turn, candidate):
        number = candidate.config["n"]
        return (str(self.code.get(number, (turn.problem.key, turn.implementation.name, number))),)

    def _judge(self, turn, candidate, outcome) -> float | None:
        self.judged.append((turn.problem, candidate.variant, candidate.config["n"]))
        return dict(turn.candidates)[candidate] if misfit(outcome, B200) is None else None

    def run(self, goal: int) -> list[int]:
        """The numbers that were compiled, in order; outcomes arrive one job late."""
        while True:
            waiting = list(self.plan.jobs(goal))
            if not waiting:
                return self.jobs
            for problem, candidate in waiting:
                number = candidate.config["n"]
                self.jobs.append(number)
                self.plan.took(problem, candidate, SPILLS if number in self.spilling else FITS)


def test_all_compile_their_best_before_any_compiles_a_second_one() -> None:
    table = Table({("a", SMALL): {1: 10.0, 2: 20.0}, ("a", LARGE): {3: 10.0, 4: 20.0},
                   ("b", LARGE): {5: 99.0}})  # fmt: skip
    assert table.run(4) == [1, 3, 5, 2, 4]
    assert [turn.fitting for turn in table.turns] == [2, 2, 1]


def test_code_is_compiled_once_for_all_candidates_that_need_it() -> None:
    same = {1: "x", 3: "x"}
    table = Table({("a", SMALL): {1: 10.0}, ("a", LARGE): {3: 10.0, 4: 20.0}}, code=same)
    assert table.run(2) == [1, 4]
    assert (LARGE, "a", 3) in table.judged and table.plan.compiled == 2
    grids = Table({("a", SMALL): {1: 10.0, 2: 20.0, 3: 30.0}}, code={1: "x", 2: "x"})
    assert grids.run(3) == [1, 3] and grids.turns[0].fitting == 3


def test_ready_code_comes_first_where_estimates_hardly_differ_and_only_there() -> None:
    near = Table({("a", SMALL): {1: 10.0}, ("a", LARGE): {2: 10.0, 3: 10.1}}, code={1: "x", 3: "x"})
    assert near.run(1) == [1]
    far = Table({("a", SMALL): {1: 10.0}, ("a", LARGE): {2: 10.0, 3: 13.0}}, code={1: "x", 3: "x"})
    assert far.run(1) == [1, 2]
    cached = Table({("a", SMALL): {1: 10.0, 2: 30.0, 3: 40.0}}, cached=[3])
    assert cached.run(2) == [1], "the second one need not be good, and 3 is there"


def test_what_does_not_fit_gives_its_place_to_the_next() -> None:
    table = Table({("a", SMALL): {1: 10.0, 2: 11.0, 3: 12.0}}, spilling=[1])
    assert table.run(2) == [1, 2, 3] and table.turns[0].fitting == 2
    assert table.turns[0].is_over


def test_what_does_not_fit_for_one_problem_is_not_tried_for_the_next() -> None:
    table = Table({("a", SMALL): {1: 10.0, 2: 11.0}, ("a", LARGE): {1: 10.0, 2: 11.0}},
                  spilling=[1])  # fmt: skip
    jobs = table.plan.jobs(1)
    table.plan.took(*next(jobs), SPILLS)
    assert [(p == LARGE, c.config["n"]) for p, c in jobs] == [(False, 2), (True, 2)]


def test_further_candidates_are_those_that_compiled_fast_elsewhere() -> None:
    table = Table({("a", SMALL): {1: 1.0}, ("b", SMALL): {2: 1.0},
                   ("a", LARGE): {4: 1.0, 1: 2.0}, ("b", LARGE): {5: 1.0, 3: 2.0}})  # fmt: skip
    for problem, candidate in list(table.plan.jobs(1)):
        cpu_s = 5.0 if candidate.variant == "a" else 1.0
        table.plan.took(problem, candidate, replace(FITS, cpu_s=cpu_s))
    assert [c.config["n"] for _, c in table.plan.jobs(2)] == [3, 1]


def test_code_that_serves_most_for_its_seconds_comes_first() -> None:
    same = {2: "x", 5: "x", 8: "x"}
    table = Table({("a", SMALL): {1: 1.0, 2: 2.0}, ("b", SMALL): {4: 1.0, 5: 2.0},
                   ("a", LARGE): {7: 1.0, 8: 2.0, 9: 3.0}}, code=same)  # fmt: skip
    assert table.run(2) == [1, 4, 7, 2]
    assert [turn.fitting for turn in table.turns] == [2, 2, 2]


def test_the_best_is_looked_for_until_no_candidate_left_may_beat_it() -> None:
    """The one with the least estimate spills, and the next is predicted far behind the third."""
    table = Table({("a", SMALL): {1: 10.0, 2: 10.4, 3: 12.0, 4: 20.0}}, spilling=[1])
    assert table.run(1) == [1, 2]
    slow = Table({("a", SMALL): {1: 10.0, 2: 10.4, 3: 12.0, 4: 20.0}})
    slow.plan._judge = lambda turn, c, outcome: 30.0 if c.config["n"] < 3 else 12.0
    assert slow.run(1) == [1, 2, 3]


def test_seconds_are_learned_from_each_value() -> None:
    seconds = CompileSeconds()
    kinds = {(a, b): Kind("v", (("a", a), ("b", b))) for a in (1, 2) for b in (1, 2)}
    assert seconds.expected(kinds[1, 1]) == 1.0
    for each, took in (((1, 1), 1.0), ((1, 2), 4.0), ((2, 1), 2.0)):
        seconds.took(kinds[each], took)
    assert seconds.expected(kinds[2, 2]) > seconds.expected(kinds[2, 1])
    assert seconds.expected(kinds[1, 2]) > seconds.expected(kinds[1, 1])
    other = Kind("w", (("a", 1),))
    assert 1.0 < seconds.expected(other) < 4.0, "the mean of all implementations"


def test_few_spilled_bytes_cost_time_and_many_leave_a_kernel_out() -> None:
    few = Built(({"spill_bytes": MAX_SPILL_BYTES}, {"spill_bytes": 8}))
    assert misfit(few, B200) is None and spilled(few) == MAX_SPILL_BYTES
    assert 1 + spilled(few) / SLOW_SPILL_BYTES < 1.25
    assert misfit(Built(({"spill_bytes": MAX_SPILL_BYTES + 1},)), B200) is not None


@pytest.mark.parametrize("name", ["64x1-128-4096", "64x1-128-4096-fp8", "128x1-16-4096"])
def test_an_untuned_b200_gets_a_kernel_that_its_tune_would_not_leave_out(name: str) -> None:
    """Compiled for sm_100a, not run."""
    problem = MLA.named(name)
    decision = choose(MLA, problem, B200, ())
    assert decision.why == "default"
    steps = Cuda().build(decision.implementation, problem, decision.config, B200)
    assert misfit(Built(tuple(steps)), B200) is None


def predicted(gpu: str, us: float = 40.0, kind: str = "predicted") -> Choice:
    implementation = catalog.implementation("gemm", "cuda", "tma")
    config = implementation.default(LARGE, B200)
    return Choice("gemm", gpu, LARGE, "cuda", "tma", config, kind, us, "", "run", "local")


def test_a_gb200_borrows_the_predictions_of_a_b200_and_says_so() -> None:
    decision = choose(GEMM, LARGE, GB200, (predicted("b200"),), models={})
    assert decision.why == "borrowed prediction" and decision.evidence.gpu == "b200"
    assert decision.config == predicted("b200").config and decision.missed
    own = (predicted("b200"), predicted("gb200", 50.0))
    assert choose(GEMM, LARGE, GB200, own, models={}).why == "predicted"
    measured = (predicted("b200"), predicted("b200", 60.0, kind="measured"))
    assert choose(GEMM, LARGE, GB200, measured, models={}).why == "borrowed"
    other = replace(predicted("b200"), gpu="h200")
    assert choose(GEMM, LARGE, GB200, (other,), models={}).why == "default"


def test_explain_marks_a_borrowed_prediction(monkeypatch, request) -> None:
    rows = (predicted("b200"),)
    monkeypatch.setattr("kernelcat.call.evidence.of_entry", lambda name: (rows, ()))
    request.addfinalizer(kernelcat.reload)
    kernelcat.reload()
    text = str(kernelcat.get("gemm").explain(gpu="gb200", **LARGE.values))
    assert "borrowed prediction: ranked by the cost model for another GPU" in text
    assert "40.00 us predicted on b200" in text
