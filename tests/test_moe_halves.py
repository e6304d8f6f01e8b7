"""Steps in halves: the bits of whole steps, with exchanges in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from moe_expert_ranks import Ranks
from moe_followers import LIMITS
from moe_models import NUM_DECODED, made
from ranks_threads import together

from kernelcat import catalog, moe
from kernelcat.call import operator
from kernelcat.cli import main
from kernelcat.errors import InvalidArgument, KernelcatError
from kernelcat.moe import blocks
from kernelcat.moe.engine import engine as engines
from kernelcat.moe.engine.ahead import called
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.parameters import SamplingParameters
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.step_sizes import Size
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.ops import bind, on
from kernelcat.moe.parallel.beside import Beside
from kernelcat.moe.parallel.device_exchange import best
from kernelcat.moe.parallel.exchange import Exchange
from kernelcat.moe.parallel.expert_layer import (
    ARRIVED,
    NUM_SERVED,
    PLACES,
    DividedExperts,
    StepCounts,
)
from kernelcat.moe.parallel.expert_model import divide
from kernelcat.moe.parallel.halves import (
    EXPERT_RANKS,
    EXPERT_SMS,
    REDUCE_SMS,
    SPARED_WIDTH,
    SPLIT_TOKENS,
    Halves,
    split_tokens,
)
from kernelcat.moe.parallel.host_exchange import HostExchange
from kernelcat.moe.source import ModelSource
from kernelcat.moe.weights import ExpertShare
from kernelcat.reference.all_reduce import SM_BLOCKS
from kernelcat.runtime import gpu as gpus

HIDDEN, INTER, EXPERTS, TOP_K = 64, 32, 6, 2
WHOLE = ["moe_dispatch", "moe_combine"]
DIVIDED = ["moe_dispatch"] * 2 + ["moe_combine"] * 2
CPU = torch.device("cpu")


def recorded(exchange: Exchange) -> list[str]:
    """Gets the names of the entries that ``exchange`` runs from now on."""
    names, run = list[str](), exchange.run

    def record(name: str, *tensors: Any, **axes: Any) -> None:
        names.append(name)
        run(name, *tensors, **axes)

    exchange.run = record  # type: ignore[method-assign]
    return names


def halves_of(exchange: Exchange, min_tokens: int) -> Halves:
    return Halves(exchange, Beside(CPU), min_tokens)


# ---- experts of several ranks --------------------------------------------------------------------


def layer_of(
    tokens: int, min_tokens: int, has_shared: bool
) -> Callable[[Exchange], tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """What a layer of a rank makes of its tokens, the counts, and the names of its exchanges.

    Products are exact, of small integers: torch's depend on how many rows there are.
    """

    def run(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        generator = torch.Generator().manual_seed(exchange.rank)
        local = EXPERTS // exchange.ranks
        draw = torch.Generator().manual_seed(9)  # the same weights on all ranks
        w1 = torch.randint(-3, 4, (EXPERTS, INTER, HIDDEN), generator=draw).float()
        w2 = torch.randint(-3, 4, (EXPERTS, HIDDEN, INTER), generator=draw).float()
        held = slice(exchange.rank * local, (exchange.rank + 1) * local)
        step = StepCounts(
            *(torch.zeros(1, local + 1, dtype=dtype) for dtype in (torch.int32, torch.int64))
        )
        experts = {
            "w1": w1[held],
            "w2": w2[held],
            PLACES: torch.tensor([3, 0, 1, 5, 4, 2], dtype=torch.int32),
            ARRIVED: step.arrived[0],
            NUM_SERVED: step.num_served[0],
        }
        a = torch.randint(-3, 4, (tokens, HIDDEN), generator=generator).float()
        x, logits = (torch.randn(tokens, n, generator=generator) for n in (HIDDEN, EXPERTS))
        is_added = torch.arange(tokens)[:, None] >= tokens - exchange.rank  # the last ones of some
        grouped = GroupedExperts(bind("moe_route", CPU), bind("moe_gemm", CPU))
        names = recorded(exchange)
        layer = DividedExperts(exchange, grouped, Beside(CPU), step)
        y = layer(
            a, logits, experts, x, (lambda residual: residual + a) if has_shared else None,
            is_added, halves_of(exchange, min_tokens),
            top_k=TOP_K, activation="none", act_dtype="bfloat16", renormalize=True,
        )  # fmt: skip
        layer.end_step()
        return y, step.num_served[0], names

    return run


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("tokens", [16, 17, 31, 41])
@pytest.mark.parametrize("has_shared", [False, True])
def test_halves_of_a_layer_have_the_bits_of_the_whole(
    ranks: int, tokens: int, has_shared: bool, tmp_path: Path
) -> None:
    results = []
    for name, min_tokens in (("whole", 0), ("halves", 16)):
        (tmp_path / name).mkdir()
        layer = layer_of(tokens, min_tokens, has_shared)
        results.append(together(tmp_path / name, [layer] * ranks))
    served = 0
    for (y, counts, names), (split, split_counts, split_names) in zip(*results, strict=True):
        assert torch.equal(y, split) and y.abs().sum() > 0
        assert torch.equal(counts[1:] - counts[:-1], split_counts[1:] - split_counts[:-1])
        served += int(counts[-1])
        assert names == WHOLE and split_names == DIVIDED
    assert served == TOP_K * sum(tokens - rank for rank in range(ranks))  # others were added


def test_fewer_tokens_stay_whole(tmp_path: Path) -> None:
    for tokens, min_tokens, expected in ((31, 32, WHOLE), (32, 32, DIVIDED), (8, 4, WHOLE)):
        folder = tmp_path / f"{tokens}"
        folder.mkdir()
        for _, _, names in together(folder, [layer_of(tokens, min_tokens, False)] * 2):
            assert names == expected


@pytest.mark.parametrize(
    ("tokens", "first"),
    [(SPLIT_TOKENS - 1, 0), (SPLIT_TOKENS, 2048), (4097, 2056), (8192, 4096), (0, 0)],
)
def test_first_halves_begin_at_whole_vectors(tokens: int, first: int) -> None:
    exchange: Any = None
    assert Halves(exchange, Beside(CPU)).first(tokens) == first
    assert Halves(exchange, Beside(CPU), 0).first(tokens) == 0


# ---- output projections of several ranks ---------------------------------------------------------


def output_of(
    tokens: int, min_tokens: int
) -> Callable[[Exchange], tuple[tuple[torch.Tensor, ...], list[str]]]:
    """The output projection of a rank; numbers are small integers, so that sums are exact."""

    def run(exchange: Exchange) -> tuple[tuple[torch.Tensor, ...], list[str]]:
        generator = torch.Generator().manual_seed(exchange.rank)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        same = torch.Generator().manual_seed(9)
        x = torch.randn(tokens, HIDDEN, generator=same)
        o = blocks.Output(integers(HIDDEN, INTER), torch.ones(HIDDEN), integers(HIDDEN))
        model: Any = SimpleNamespace(
            ops=on("cpu", 0), config=SimpleNamespace(rms_norm_eps=1e-5), exchange=exchange,
            halves=halves_of(exchange, min_tokens),
        )  # fmt: skip
        names = recorded(exchange)
        y, a, logits = blocks.output(model, o, integers(tokens, INTER), x)
        assert logits is None
        return (y, a), names

    return run


@pytest.mark.parametrize("tokens", [16, 19, 40])
def test_halves_of_an_output_projection_have_the_bits_of_the_whole(
    tokens: int, tmp_path: Path
) -> None:
    results = []
    for name, min_tokens in (("whole", 17 + tokens), ("halves", tokens)):
        (tmp_path / name).mkdir()
        results.append(together(tmp_path / name, [output_of(tokens, min_tokens)] * 2))
    for (whole, names), (split, split_names) in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
        assert names == ["all_reduce"] and split_names == ["all_reduce"] * 2


# ---- engines -------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the SMs of each exchange that begins beside products, in this process."""
    sms, start = list[int](), Halves.start

    def counted(self: Halves, exchange: Any, taken: int, after: Any) -> Any:
        sms.append(taken)
        return start(self, exchange, taken, after)

    monkeypatch.setattr(Halves, "start", counted)
    return sms


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_ranks_that_divide_experts_write_the_same_tokens_in_halves(
    name: str, tmp_path: Path, started: list[int]
) -> None:
    case = made(name, tmp_path)
    (tmp_path / "meet").mkdir()
    ranks = Ranks.opened(case.path, tmp_path / "meet", split_tokens=16)
    assert ranks.write((0, 1, 0), case.prompts, max_tokens=NUM_DECODED) == case.texts
    assert set(started) == {EXPERT_SMS}
    made.cache_clear()


def test_ranks_that_share_layers_write_the_same_tokens_in_halves(started: list[int]) -> None:
    prompt, texts = list(range(3, 60)), []
    for tp in (1, 2):
        model = ModelSource("small-llama", "cpu", has_random_weights=True, tp=tp).open()
        settings = EngineSettings(LIMITS, 16, cpu_cache_bytes=8 << 20, split_tokens=16)
        engine = Engine(model, settings)
        request = engine.submit(prompt, SamplingParameters(temperature=0, max_tokens=6))
        while engine.has_work:
            assert not any(output.error for output in engine.step())
        texts.append(request.tokens)
        engine.close()
        if model.exchange is not None:
            model.exchange.close()
        assert set(started) == ({REDUCE_SMS} if tp == 2 else set())
    assert texts[0] == texts[1]


def test_products_of_halves_are_compiled_ahead() -> None:
    model = moe.random_model("small-qwen3-moe", "cpu", torch.bfloat16, share=ExpertShare(0, 2))
    exchange: Any = HostExchange.__new__(HostExchange)  # nothing runs in an outline
    exchange.rank, exchange.ranks = 0, 2
    divide(model, exchange)
    model.halves = halves_of(exchange, 32)
    sizes = [Size(2, tokens, 2, tokens) for tokens in (31, 48)]
    cache = moe.KvCache.allocate(model.cache_layers, [9], 16, model.dtype, model.device)
    problems = called(model, cache, sizes, 4)
    products = [problem for problem in problems if problem.entry == "moe_gemm"]
    assert {problem["tokens"] for problem in products} == {2 * 31, 2 * 24}


def test_the_option_says_when_steps_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(model: Any, settings: EngineSettings) -> None:
        raise KernelcatError(f"split_tokens is {settings.split_tokens}")

    monkeypatch.setattr(engines, "Engine", tell)
    command = ["moe", "bench", "small-llama", "--random-weights", "--device", "cpu"]
    for more, tokens in (([], None), (["--split-tokens", "0"], 0), (["--split-tokens", "96"], 96)):
        result = CliRunner().invoke(main, [*command, *more])
        assert f"split_tokens is {tokens}\n" in result.output
    with pytest.raises(InvalidArgument, match="split_tokens=-1 must not be negative"):
        EngineSettings(split_tokens=-1)


def test_halves_are_the_default_where_they_should_pay() -> None:
    assert split_tokens(None, 2, has_divided_experts=False) == SPLIT_TOKENS
    assert split_tokens(None, 2, has_divided_experts=True) == 0
    assert split_tokens(None, EXPERT_RANKS, has_divided_experts=True) == SPLIT_TOKENS
    assert split_tokens(96, 2, has_divided_experts=True) == 96
    assert split_tokens(0, 4, has_divided_experts=False) == 0


def test_products_of_few_columns_leave_no_sms(tmp_path: Path) -> None:
    halves = Halves(HostExchange(0, 1, tmp_path / "meet"), Beside(torch.device("cpu")))
    assert halves.of_width(SPARED_WIDTH).spare(REDUCE_SMS) == REDUCE_SMS
    assert halves.of_width(SPARED_WIDTH - 1).spare(REDUCE_SMS) == 0
    halves.exchange.close()


# ---- parts of a GPU ------------------------------------------------------------------------------


def group() -> Any:
    return SimpleNamespace(machine=gpus.find("h200x2-nvlink"), gpu=gpus.find("h200"))


def test_exchanges_within_few_sms_have_thread_blocks_for_these() -> None:
    dtype = {"dtype": "bfloat16"}
    problems = []
    for ranks, tokens in ((2, 4096), (4, 4096), (8, 4096), (2, 2048)):
        for hidden, experts, top_k in ((2880, 32, 4), (7168, 256, 8)):
            sizes = {"ranks": ranks, "tokens": tokens, "hidden": hidden, **dtype}
            routed = {"top_k": top_k, "local_experts": experts // ranks}
            problems += [
                ("moe_dispatch", EXPERT_SMS, {**sizes, **routed, "act_dtype": "bfloat16"}),
                ("moe_combine", EXPERT_SMS, {**sizes, **routed, "residual": True}),
                ("all_reduce", REDUCE_SMS, {**sizes, "residual": True, "norm": True, "eps": 1e-5}),
            ]
    for name, sms, axes in problems:
        entry = catalog.entry(name)
        problem = entry.described(**axes)
        implementation, config, sized_for = best(entry, problem, group(), sms)
        assert sized_for == sms
        part = replace(group().gpu, sms=sms)
        for step in implementation.program(problem, config, part).steps:
            assert prod(step.grid) <= SM_BLOCKS * sms, (implementation.name, config)


def test_an_exchange_that_fits_on_no_few_sms_takes_the_whole_gpu() -> None:
    sizes = {"ranks": 2, "tokens": 4096, "hidden": 2880, "top_k": 4, "local_experts": 16}
    entry = catalog.entry("moe_dispatch")
    problem = entry.described(**sizes, dtype="bfloat16", act_dtype="bfloat16")
    assert best(entry, problem, group(), 4) == best(entry, problem, group())
    assert best(entry, problem, group())[2] is None


def test_an_operator_that_leaves_sms_is_sized_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def build(known: Any, problem: Any, gpu: gpus.Gpu, *_: Any) -> tuple[Any, str]:
        sizes.append(gpu.sms)
        return None, f"a launcher for {gpu.sms} SMs"

    monkeypatch.setattr(operator, "build", build)
    monkeypatch.setattr(operator, "_gpu", lambda device: gpus.find("h200"))
    op = operator.Op(catalog.entry("gemm"), operator.Pin())
    problem = op.entry.described(M=4096, N=2880, K=2048)
    for each in (op, op.leaving(REDUCE_SMS), op.leaving(REDUCE_SMS), op.leaving(1000)):
        each._load(problem, 0)
    assert sizes == [132, 100, 1]
    assert op.launchers() == [f"a launcher for {sms} SMs" for sms in sizes]
    op.forget()
    assert op.launchers() == []


@pytest.mark.parametrize(
    ("name", "variant", "axes"),
    [
        ("gemm", "wgmma", {"M": 4096, "N": 2880, "K": 2048}),
        (
            "moe_gemm",
            "decoded",
            {"N": 2880, "K": 2880, "tokens": 8192, "experts": 16, "top_k": 4, "format": "mxfp4",
             "packing": "tiles", "bias": True, "combine": True, "gather": False},
        ),
    ],
)  # fmt: skip
def test_persistent_products_leave_sms(name: str, variant: str, axes: dict[str, Any]) -> None:
    """The first launch of what serves gpt-oss-20b on a rank; `moe_gemm` then adds rows up."""
    problem, whole = catalog.entry(name).described(dtype="bfloat16", **axes), gpus.find("h200")
    implementation = catalog.implementation(name, "cuda", variant)
    config = implementation.default(problem, whole)
    for sms in (whole.sms, whole.sms - REDUCE_SMS):
        product = implementation.program(problem, config, replace(whole, sms=sms)).steps[0]
        assert product.grid[0] in (sms, sms // 2 * 2, sms // 4 * 4)
