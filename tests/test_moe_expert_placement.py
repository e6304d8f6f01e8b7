"""Which experts change places, which rank gets a request, and what sizes ranks agree on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernelcat import catalog
from kernelcat.call import evidence
from kernelcat.call.choice import choose
from kernelcat.catalog.spec import Problem
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.blocks import BlockManager, LayerGroup
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.request import Request
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.step import ScheduledChunk, Step
from kernelcat.moe.engine.step_arrays import StepArrays
from kernelcat.moe.engine.step_sizes import Size, StepSizes
from kernelcat.moe.parallel import router
from kernelcat.moe.parallel.expert_moves import rounds
from kernelcat.moe.parallel.expert_placement import evened
from kernelcat.moe.parallel.expert_product import kernel_for
from kernelcat.moe.parallel.expert_stepping import SteppedRanks
from kernelcat.moe.parallel.router import Router
from kernelcat.moe.source import ModelSource
from kernelcat.runtime import gpu

# ---- places --------------------------------------------------------------------------------------


def busiest(load: np.ndarray, ranks: int) -> float:
    """The load of the busiest rank over the mean."""
    sums = load.reshape(ranks, -1).sum(1)
    return float(sums.max() / sums.mean())


def assigned_anew(load: np.ndarray, ranks: int) -> np.ndarray:
    """Loads by place after EPLB's rule: the heaviest first, to the rank with the least load."""
    local = len(load) // ranks
    held: list[list[float]] = [[] for _ in range(ranks)]
    for each in sorted(load, reverse=True):
        min((h for h in held if len(h) < local), key=sum).append(each)
    return np.array(held).reshape(-1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("skew", [0.0, 0.7, 1.2])
def test_swaps_are_as_even_as_an_assignment_anew_and_move_less(ranks: int, skew: float) -> None:
    dice = np.random.default_rng(ranks)
    for experts in (32, 128, 256):
        load = dice.poisson(2e5 / np.arange(1, experts + 1) ** skew)
        dice.shuffle(load)
        sources = evened(load, ranks)
        assert sorted(sources) == list(range(experts))
        found, anew = busiest(load[sources], ranks), busiest(assigned_anew(load, ranks), ranks)
        assert found <= busiest(load, ranks) and found <= anew + 0.04
        local = experts // ranks
        moved = int((sources // local != np.arange(experts) // local).sum())
        assert moved <= 0.4 * experts  # an assignment anew moves experts * (1 - 1 / ranks)


def test_loads_that_are_even_or_that_nothing_evens_move_nothing() -> None:
    assert list(evened(np.full(8, 100), 2)) == list(range(8))
    assert list(evened(np.zeros(8), 2)) == list(range(8))
    assert list(evened(np.array([1000, 1, 1, 1]), 2)) == list(range(4))  # one expert is all
    # places 0 and 1 are as far above the mean as one swap can bring them down
    assert list(evened(np.array([30, 30, 10, 10]), 2)) in ([2, 1, 0, 3], [0, 2, 1, 3])


# ---- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [2, 3, 8])
def test_rounds_of_swaps_end_where_every_place_has_its_source(room: int) -> None:
    generator = np.random.default_rng(room)
    for ranks, local in [(2, 8), (4, 8), (8, 2)]:
        sources = generator.permutation(ranks * local)
        content = np.arange(ranks * local)
        for swaps in rounds(sources, local, room):
            assert {swaps[source]: source for source in swaps} == swaps
            assert np.bincount(np.array(list(swaps)) // local).max() <= room
            content[list(swaps)] = content[list(swaps.values())]
        assert (content == sources).all()
    assert not list(rounds(np.arange(4), 2, room))


def test_requests_go_to_the_rank_with_the_fewest() -> None:
    chosen = Router(3, 4)
    assert [chosen.start([i]) for i in range(4)] == [0, 1, 2, 0]
    chosen.end(1)
    assert chosen.start([9]) == 1 and chosen.num_running == [2, 1, 1]


def test_a_request_follows_its_prefix_while_the_load_allows_it() -> None:
    chosen, prompt = Router(2, 4), [*range(12)]
    assert chosen.start([7]) == 0
    assert chosen.start(prompt) == 1
    follows = [chosen.start([*prompt, i]) for i in range(10)]
    lead = router.MAX_LEAD
    assert follows[:lead] == [1] * lead and 0 in follows[lead : lead + 2]
    assert abs(chosen.num_running[0] - chosen.num_running[1]) <= lead + 1
    other = Router(2, 4)
    assert other.start(prompt) == 0 and other.start(prompt, salt="other") == 1
    assert other.start(prompt[:3]) == 0  # less than a block: no prefix; both have one request


def test_the_router_forgets_what_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_BLOCKS", 3)
    chosen = Router(2, 2)
    assert chosen.start([1, 2]) == 0
    assert chosen.start([8, 9, 8, 9, 8, 9]) == 1
    assert chosen.start([3, 3, 4, 4, 5, 5]) == 0  # three blocks push out the first one
    assert chosen.start([1, 2]) == 1


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize(
    ("batches", "context"), [((1, 2, 4), 64), ((1, 2), 7), ((), 7), ((), 64), ((3,), 1000)]
)
def test_the_steps_of_all_ranks_can_be_padded_to_one_size(
    batches: tuple[int, ...], context: int, num_drafts: int
) -> None:
    limits = Limits(step_tokens=40, max_running=5, context=context)
    sizes = StepSizes(limits, num_drafts, batches, is_lockstep=True)
    manager = BlockManager([LayerGroup("all", 90)], 4, -(-context // 4))
    arrays = StepArrays(manager, sizes)
    dice = random.Random(context)
    known = {(size.batch, size.tokens) for size in sizes.every()}

    def step() -> Step:
        made, left = Step(0), limits.step_tokens
        for _ in range(dice.randint(0, limits.max_running)):
            count = dice.choice((1, 1, dice.randint(1, min(left, context)))) if left else 0
            drafts = min(count - 1, dice.randint(0, num_drafts))
            rows = dice.choice((0, 1 + drafts, 1 + drafts))
            if count:
                request = Request("", [1])
                request.table = manager.open([], 0)
                made.add(ScheduledChunk(request, 0, [1] * count, [], rows, 0, -1, 0))
            left -= count
        return made

    for _ in range(300):
        steps = [step(), step(), Step(0)]
        size = sizes.padded(
            Size.largest([Size.of(each) for each in steps if each.chunks] or [Size(1, 1, 1, 1)])
        )
        assert not batches or (size.batch, size.tokens) in known
        for each in steps:
            arrays.fill(each, size)
            assert arrays.num_tokens == each.num_tokens and arrays.cu_q[-1] == size.tokens


# ---- kernels -------------------------------------------------------------------------------------


def test_a_product_has_the_kernel_of_the_rows_that_come() -> None:
    """Where that was measured its winner, else the least estimate, for a half of the tokens."""
    h200, named = gpu.find("h200"), catalog.entry("moe_gemm").named("gptoss-up-1024-mxfp4")
    twice = Problem.of("moe_gemm", **{**named.values, "tokens": 2048})
    assert kernel_for(twice, 2, h200) == kernel_for(named, 1, h200)
    measured = choose(catalog.entry("moe_gemm"), named, h200, evidence.of_entry("moe_gemm")[0])
    assert measured.why == "exact" and kernel_for(twice, 2, h200)[1] == measured.config
    few = Problem.of("moe_gemm", **{**named.values, "tokens": 256, "experts": 16})
    implementation, config = kernel_for(few, 2, h200)
    served = Problem.of("moe_gemm", **{**few.values, "tokens": 128})
    estimates = {
        each: implementation.estimate(served, each, h200)
        for each in (config, kernel_for(few, 1, h200)[1])
    }
    assert len(estimates) == 2 and estimates[config] == min(estimates.values())
    assert implementation.why_not(config, few, h200) is None


# ---- processes -----------------------------------------------------------------------------------


def test_a_single_rank_divides_nothing() -> None:
    source = ModelSource("small-gpt-oss", "cpu", has_random_weights=True)
    with pytest.raises(InvalidArgument, match="1 ranks and 0 steps: experts are divided among two"):
        SteppedRanks(source, EngineSettings(), 1)
