"""Experts divided among ranks: the tokens are those of one rank, whatever ranks do meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_expert_ranks import Ranks, together
from moe_models import NUM_DECODED, made
from moe_schedules import engine, tokens, write
from torch.utils._python_dispatch import TorchDispatchMode

from kernelcat import moe
from kernelcat.errors import InvalidArgument
from kernelcat.moe.engine.ahead import called
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.request import FinishReason
from kernelcat.moe.engine.speculation import Speculation
from kernelcat.moe.engine.step_sizes import Size, StepSizes
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.expert_model import divide
from kernelcat.moe.parallel.expert_server import ExpertServer
from kernelcat.moe.parallel.expert_statistics import ExpertStatistics
from kernelcat.moe.parallel.host_exchange import HostExchange
from kernelcat.moe.serve.engine_messages import Profile, Refused, Submit, Wake
from kernelcat.moe.weights import ExpertShare

MODELS = ("gpt-oss", "qwen3-moe", "deepseek-v3")
PLACES = {"spread": (0, 1, 0), "all on one rank": (1, 1, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    made.cache_clear()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", PLACES)
def test_greedy_tokens_are_those_of_transformers(
    name: str, where: str, folder: Path, tmp_path: Path
) -> None:
    case = made(name, folder)
    ranks = Ranks.opened(case.path, tmp_path)
    assert ranks.write(PLACES[where], case.prompts, max_tokens=NUM_DECODED) == case.texts


@pytest.mark.parametrize(
    "settings",
    [
        {"is_overlapped": True, "batch_sizes": (1, 2, 4)},
        {"speculation": Speculation(2, 1), "batch_sizes": (1, 4)},
        {"is_overlapped": True},
    ],
    ids=["padded", "drafts", "overlapped"],
)
def test_schedules_do_not_change_greedy_tokens(
    settings: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    case = made("gpt-oss", folder)
    ranks = Ranks.opened(case.path, tmp_path, **settings)
    for where in PLACES.values():
        assert ranks.write(where, case.prompts, max_tokens=NUM_DECODED) == case.texts


def test_four_ranks_hold_four_experts_each(folder: Path, tmp_path: Path) -> None:
    config = replace(moe.SIZES["small-qwen3-moe"], num_experts=16)  # type: ignore[call-arg]
    path = moe.write_checkpoint(folder / "sixteen", config)
    prompts = [[1, 2, 3] * 9, [5] * 4, [200, 7]]
    texts = tokens(write(engine(moe.load(path, "cpu")), prompts, max_tokens=NUM_DECODED))
    ranks = Ranks.opened(path, tmp_path, 4)
    assert ranks.write((0, 3, 3), prompts, max_tokens=NUM_DECODED) == texts
    assert len(ranks.engines[2].model.layers[0].experts["w1"]) == 4


# ---- loads, and experts that move ----------------------------------------------------------------


def statistics(ranks: Ranks) -> ExpertStatistics:
    return ExpertStatistics.together([engine.statistics() for engine in ranks.engines])


@pytest.mark.parametrize("name", MODELS)
def test_experts_that_move_change_no_token_and_lose_no_count(
    name: str, folder: Path, tmp_path: Path
) -> None:
    case = made(name, folder)
    (tmp_path / "still").mkdir()
    still = Ranks.opened(case.path, tmp_path / "still")
    assert still.write((0, 1, 0), case.prompts, max_tokens=NUM_DECODED) == case.texts
    ranks = Ranks.opened(case.path, tmp_path, rebalance_every=2, is_overlapped=True)
    assert ranks.write((0, 1, 0), case.prompts, max_tokens=NUM_DECODED) == case.texts
    assert ranks.write((1, 1, 1), case.prompts, max_tokens=NUM_DECODED) == case.texts
    before, after = statistics(still), statistics(ranks)
    assert after.moved_experts_total and not before.moved_experts_total
    num_tokens = sum(map(len, case.texts)) - len(case.texts)  # the last one of each is not computed
    top_k = case.model.config.num_experts_per_tok
    assert [sum(row) for row in before.expert_assignments_total] == [
        top_k * num_tokens for _ in before.expert_assignments_total
    ]
    for row, ranks_row in zip(
        after.expert_assignments_total, after.rank_assignments_total, strict=True
    ):
        assert sum(row) == sum(ranks_row)
    assert "experts have moved" in after.summary


def test_a_place_has_the_weights_of_its_expert(folder: Path, tmp_path: Path) -> None:
    """After moves every rank's places hold what one rank's model has of these experts."""
    case = made("gpt-oss", folder)
    ranks = Ranks.opened(case.path, tmp_path, rebalance_every=1)
    ranks.write((0, 1, 0), case.prompts, max_tokens=NUM_DECODED)
    moved = 0
    for rank, own in enumerate(ranks.engines):
        for index, layer in enumerate(own.model.layers):
            expert_in = own._load.expert_in[index]
            moved += int((expert_in != range(8)).sum())
            assert sorted(expert_in) == list(range(8))
            assert torch.equal(layer.experts["places"][expert_in], torch.arange(8).int())
            for name in ("w1", "w1_scale", "bias1", "w2", "w2_scale", "bias2"):
                whole = case.model.layers[index].experts[name].view(torch.uint8)
                held = whole[expert_in[4 * rank : 4 * rank + 4]]
                assert torch.equal(layer.experts[name].view(torch.uint8), held)
    assert moved


# ---- what a layer launches -----------------------------------------------------------------------


class Recorded(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("can_move", [False, True])
def test_a_layer_launches_nothing_of_torch_but_a_mask(can_move: bool) -> None:
    """Beside entries; experts that may move cost one look-up more."""
    model = moe.random_model("small-gpt-oss", "cpu", torch.bfloat16, share=ExpertShare(0, 2))
    exchange: Any = HostExchange.__new__(HostExchange)  # nothing runs in an outline
    exchange.rank, exchange.ranks = 0, 2
    divide(model, exchange, can_move)
    cache = moe.KvCache.allocate(model.cache_layers, [9, 9], 16, model.dtype, model.device)
    counts = []
    for layers in (1, 2):  # with a window and without
        part = copy(model)
        part.layers = model.layers[:layers]
        part_cache = moe.KvCache(cache.layers[:layers], cache.groups[:layers])
        with Recorded() as recorded:
            called(part, part_cache, [Size(4, 4, 4, 1)], 4)
        counts.append(recorded.counts)
    launched = {
        name: count
        for name, count in (counts[1] - counts[0]).items()
        if not name.startswith(("empty", "new_empty", "slice", "select", "view", "_unsafe_view"))
    }
    assert launched == {
        "masked_fill_.Scalar": 1,
        **({"index_select": 1} if can_move else {}),
    }


# ---- what ranks agree on -------------------------------------------------------------------------


def test_ranks_sleep_when_all_have_ended_and_wake_together(folder: Path, tmp_path: Path) -> None:
    case = made("gpt-oss", folder)
    ranks = Ranks.opened(case.path, tmp_path)
    for where in ((0, 0, 0), (1, 1, 1)):
        assert ranks.write(where, case.prompts, max_tokens=NUM_DECODED) == case.texts
        assert not any(engine.has_work for engine in ranks.engines)
    steps = {engine.statistics().steps_total for engine in ranks.engines}
    assert len(steps) == 1


def test_a_refused_request_wakes_its_rank_as_it_has_woken_the_others(
    folder: Path, tmp_path: Path
) -> None:
    case = made("gpt-oss", folder)
    ranks, tokenizer = Ranks.opened(case.path, tmp_path), SimpleNamespace()
    mine, theirs = zip(Pipe(), Pipe(), strict=True)
    servers = [
        ExpertServer(engine, tokenizer, pipe)
        for engine, pipe in zip(ranks.engines, theirs, strict=True)
    ]
    servers[0].take(Submit("long", [1] * 999, SamplingParameters(max_tokens=1), False, None, ""))
    servers[1].take(Wake())
    assert isinstance(mine[0].recv(), Refused)
    assert all(engine.has_work for engine in ranks.engines)
    ranks.run()  # would fail if one of them slept


def test_ranks_begin_to_record_when_they_sleep(folder: Path, tmp_path: Path) -> None:
    """Not before: they agree on steps until then."""
    case = made("gpt-oss", folder)
    ranks, (_, pipe) = Ranks.opened(case.path, tmp_path), Pipe()
    server, asked = ExpertServer(ranks.engines[0], SimpleNamespace(), pipe), []
    ranks.engines[0].profile = lambda *what: asked.append(what)  # type: ignore[method-assign]
    request = ranks.submit(0, case.prompts[2], max_tokens=2)
    server.take(Profile([[1, 2]], 1, tmp_path / "trace.json", 3))

    def serve() -> None:
        while server.has_work:
            if asked:
                raise AssertionError("recorded before the ranks sleep")
            server.step()

    other = ranks.engines[1]
    together([serve, lambda: [other.step() for _ in iter(lambda: other.has_work, False)]])
    assert request.num_written == 2 and asked == [([[1, 2]], 1, tmp_path / "trace.json", 3)]


def test_a_rank_that_fails_ends_all_requests_with_its_reason(folder: Path, tmp_path: Path) -> None:
    case = made("gpt-oss", folder)
    ranks = Ranks.opened(case.path, tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel has failed")

    ranks.engines[1]._runner.collect = fail  # type: ignore[method-assign]
    for rank in (0, 1):
        ranks.submit(rank, case.prompts[2], max_tokens=NUM_DECODED)
    ranks.run()
    ended = [output for output in ranks.outputs if output.finish_reason is FinishReason.ERROR]
    assert len(ended) == 2 and all("a kernel has failed" in output.error for output in ended)
    assert not any(engine.is_healthy for engine in ranks.engines)


def test_a_rank_that_has_ended_is_an_error_of_the_others(folder: Path, tmp_path: Path) -> None:
    case = made("gpt-oss", folder)
    ranks = Ranks.opened(case.path, tmp_path)
    ranks.engines[0].close()
    request = ranks.engines[1].submit(case.prompts[2])
    (output,) = ranks.engines[1].step()
    assert output.request_id == request.id and output.error == "rank 0 has ended"


class Outlined(Exchange):
    """An exchange for outlines, in which nothing runs."""

    def _run(self, name: str, *_: Any) -> None:
        raise AssertionError(f"{name} runs in an outline")

    def _shared_bytes(self, size: int) -> list[torch.Tensor]:
        raise AssertionError(f"{size} bytes in an outline")


def test_products_of_all_ranks_rows_are_compiled_ahead() -> None:
    model = moe.random_model("small-deepseek-v3", "cpu", torch.bfloat16, share=ExpertShare(0, 2))
    meeting: Any = SimpleNamespace(rank=0, ranks=2)
    divide(model, Outlined(meeting), can_move=True)
    sizes = StepSizes(Limits(step_tokens=20, max_running=2, context=64), 0, (1,), True)
    cache = moe.KvCache.allocate(model.cache_layers, [9], 16, model.dtype, model.device)
    problems = called(model, cache, sizes.every(), 4)
    products = [problem for problem in problems if problem.entry == "moe_gemm"]
    assert {problem["tokens"] for problem in products} == {
        2 * size.tokens for size in sizes.every()
    }
    assert {problem["experts"] for problem in products} == {4}
    assert {problem["experts"] for problem in problems if problem.entry == "moe_route"} == {8}
    assert not [problem for problem in problems if problem.entry == "moe_mlp"]


# ---- what cannot be divided ----------------------------------------------------------------------


def test_experts_are_divided_evenly_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="8 experts cannot be divided among 3 ranks"):
        moe.random_model("small-gpt-oss", "cpu", share=ExpertShare(0, 3))
    dense = moe.random_model("small-llama", "cpu")
    with pytest.raises(InvalidArgument, match="2 ranks would hold 2 experts each, and 3 serve"):
        model = moe.random_model("small-qwen3-moe", "cpu", share=ExpertShare(0, 4))
        divide(model, SimpleNamespace(rank=0, ranks=2))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM has no experts to divide"):
        divide(dense, HostExchange(0, 1, tmp_path / "alone"))
