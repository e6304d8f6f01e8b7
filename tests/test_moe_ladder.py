"""The ladder: rungs compute the same model, and are measured one setting at a time."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from moe_models import LENGTHS, Sequences, check

import kernelcat
from kernelcat import dtypes, moe
from kernelcat.catalog.spec import Problem
from kernelcat.cli import main
from kernelcat.errors import UnknownName, Unsupported
from kernelcat.layers import fp4
from kernelcat.moe import eager, fp8_products, ladder, ladder_report
from kernelcat.moe.bench import Decoding, time_first_token
from kernelcat.moe.divergence import Prompts, mean_divergence, next_tokens
from kernelcat.moe.engine.engine import Engine
from kernelcat.moe.engine.limits import Limits
from kernelcat.moe.engine.memory import enough
from kernelcat.moe.engine.settings import EngineSettings
from kernelcat.moe.engine.step_sizes import StepSizes
from kernelcat.moe.grouped_experts import GroupedExperts
from kernelcat.moe.ladder import Plan, Result, climb
from kernelcat.moe.ops import Ops
from kernelcat.moe.rungs import FUSED, GROUPED, RUNGS, Setup
from kernelcat.moe.source import ModelSource
from kernelcat.reference import _layer_routing

NAMES = ("gpt-oss", "llama", "qwen3-moe", "deepseek-v3", "mixtral")
PROMPTS = Prompts(2, 20, 2)
PLAN = Plan((1, 2), context=80, num_tokens=5, num_rounds=1, step_tokens=256, prompts=PROMPTS)


@cache
def model(name: str, dense_experts: bool = False) -> moe.Decoder:
    return moe.random_model(f"small-{name}", "cpu", dense_experts=dense_experts)


def with_ops(of: moe.Decoder, ops: Ops) -> moe.Decoder:
    other = copy.copy(of)
    other.ops = ops
    return other


def logits(of: moe.Decoder) -> torch.Tensor:
    """Logits of prompts of different lengths, of chunks beside decoding, and of decode steps."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]
    sequences = Sequences(of, len(texts))
    ends = [len(texts[0]) // 2, *(len(text) - 2 for text in texts[1:])]
    found = sequences.run(*(sequences.chunk(s, texts[s], 0, end) for s, end in enumerate(ends)))
    mixed = ((0, ends[0], len(texts[0]) - 1), *((s, ends[s], ends[s] + 1) for s in (1, 2)))
    found += sequences.run(*(sequences.chunk(s, texts[s], a, b) for s, a, b in mixed))
    last = (sequences.chunk(s, text, len(text) - 1, len(text)) for s, text in enumerate(texts))
    return torch.cat(found + sequences.run(*last))


# ---- other ways to run the same model -----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_torch_operators_compute_what_entries_define(name: str) -> None:
    expected = logits(model(name))
    for names in (eager.ATTENTION, eager.PRODUCTS, eager.EXPERTS, eager.EVERYTHING):
        dense = model(name, dense_experts=True)
        check(logits(with_ops(dense, eager.replace(dense.ops, names))), expected)


def test_each_replaced_entry_is_run_by_torch_and_no_other() -> None:
    ops, limits = model("llama").ops, ("fused_tokens", "projected_tokens")
    for names in (eager.ATTENTION, eager.PRODUCTS, eager.EXPERTS):
        replaced = eager.replace(ops, names)
        changed = {f.name for f in dataclasses.fields(Ops)
                   if getattr(replaced, f.name) is not getattr(ops, f.name)}  # fmt: skip
        assert changed == {*names, *(limits if names is eager.PRODUCTS else [])}


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe", "deepseek-v3", "mixtral"])
def test_experts_in_three_launches_are_moe_mlp(name: str) -> None:
    of = model(name)
    grouped = GroupedExperts(*map(kernelcat.reference, ("moe_route", "moe_gemm")))
    check(logits(with_ops(of, dataclasses.replace(of.ops, moe_mlp=grouped))), logits(of))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("score", "groups"), [("softmax", 1), ("sigmoid", 1), ("sigmoid", 4)])
def test_routing_in_torch_is_that_of_the_entry(score: str, renormalize: bool, groups: int) -> None:
    random = np.random.default_rng(0)
    drawn = random.standard_normal((50, 16), np.float32)
    correction = random.standard_normal(16, np.float32) if score == "sigmoid" else None
    axes = {"score": score, "renormalize": renormalize, "groups": groups, "scaling": 2.5,
            "top_groups": 2 if groups > 1 else 1, "top_k": 3}  # fmt: skip
    problem = Problem.of("moe_mlp", **axes, experts=16)
    ids, weights = _layer_routing.select(problem, drawn, correction)
    mine = eager.route(
        torch.from_numpy(drawn), None if correction is None else torch.from_numpy(correction),
        **axes,
    )  # fmt: skip
    assert mine[0].tolist() == ids.tolist()
    assert np.allclose(mine[1], weights, rtol=1e-5)


def test_torch_refuses_what_it_cannot_multiply_or_store() -> None:
    of = model("gpt-oss")
    with pytest.raises(Unsupported, match="16 bits only"):
        logits(with_ops(of, eager.replace(of.ops, eager.EXPERTS)))
    attends = with_ops(of, eager.replace(of.ops, eager.ATTENTION))
    with pytest.raises(Unsupported, match="needs the catalog's kernels"):
        next_tokens(attends, torch.float8_e4m3fn, PROMPTS)


def test_dense_experts_are_the_values_of_mxfp4() -> None:
    config = moe.SIZES["small-gpt-oss"]
    stored = moe.weights.RecordedWeights()
    moe.build(config, stored)
    dense = model("gpt-oss", dense_experts=True)
    name = "model.layers.1.mlp.experts.down_proj"
    codes = stored.tensors[f"{name}_blocks"].flatten(2).numpy()
    scales = stored.tensors[f"{name}_scales"].numpy()
    values = dtypes.decode(codes, "float4_e2m1fn_x2")
    expected = values * dtypes.decode(scales, "float8_e8m0fnu").repeat(fp4.BLOCKS["mxfp4"], -1)
    experts = dense.layers[1].experts
    assert "w2_scale" not in experts and np.array_equal(experts["w2"].numpy(), expected)
    half = moe.random_model(config, "cpu", torch.bfloat16, dense_experts=True).layers[1].experts
    assert half["w2"].dtype == torch.bfloat16
    assert torch.equal(half["w2"].float(), experts["w2"])  # products of MXFP4 fit into bfloat16


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_float8_products_are_near_and_not_the_same(name: str) -> None:
    of = model(name)
    exact = next_tokens(of, of.dtype, PROMPTS)
    product = kernelcat.reference("fp8_gemm")
    for quantized in (fp8_products.with_projections, fp8_products.with_head):
        ops = quantized(of.ops, of, product)
        found = mean_divergence(exact, next_tokens(with_ops(of, ops), of.dtype, PROMPTS))
        assert 1e-5 < found < 0.1


def test_every_projection_of_attention_is_multiplied_in_float8() -> None:
    for name, count in (("llama", 4), ("deepseek-v3", 5)):
        of, calls = model(name), list[torch.Size]()
        product = kernelcat.reference("fp8_gemm")

        def counted(
            *args: torch.Tensor, calls: list[torch.Size] = calls, product: Callable = product
        ) -> torch.Tensor:
            calls.append(args[2].shape)
            return product(*args)

        ops = fp8_products.with_projections(of.ops, of, counted)
        next_tokens(with_ops(of, ops), of.dtype, Prompts(1, 4, 0))
        assert len(calls) == count * len(of.layers)


# ---- divergence ---------------------------------------------------------------------------------


def test_the_divergence_of_known_distributions() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    expected = (0.5 * np.log(2) - 0.25 * np.log(2)) / 2
    assert mean_divergence(p, q) == pytest.approx(expected, rel=1e-5)
    assert mean_divergence(p, p) == 0
    scaled = p + 1e-7  # sums that are a little more than 1
    assert 0 <= mean_divergence(scaled, p) < 1e-12


def test_next_tokens_are_those_of_whole_prompts() -> None:
    of, prompts = model("gpt-oss"), Prompts(2, 30, 3)
    found = next_tokens(of, of.dtype, prompts)
    assert found.shape == (2 * 4, 256)
    assert torch.allclose(found.exp().sum(1), torch.ones(8), atol=1e-5)
    texts = prompts.tokens(256)
    assert texts[0] != texts[1] and [len(text) for text in texts] == [33, 33]
    sequences = Sequences(of, 2)
    whole = sequences.run(*(sequences.chunk(s, text, 0, 33) for s, text in enumerate(texts)))
    for s in range(2):
        for step in range(4):
            check(found[2 * step + s], whole[s][29 + step].log_softmax(0))


# ---- rungs --------------------------------------------------------------------------------------


def source(name: str = "gpt-oss") -> ModelSource:
    return ModelSource.find(f"small-{name}", "cpu", True)


def test_each_rung_changes_one_setting() -> None:
    setups = [Setup()]
    for rung in RUNGS[1:]:
        assert len(rung.changes) == 1
        setups.append(dataclasses.replace(setups[-1], **rung.changes))
        assert setups[-1] != setups[-2]
    assert {name for rung in RUNGS for name in rung.changes} == {
        field.name for field in dataclasses.fields(Setup)
    }
    assert setups[-1].experts == FUSED and not setups[-1].is_exact


def test_a_setup_chooses_operations() -> None:
    of = model("gpt-oss")
    first, attention = Setup().ops(of), Setup(has_attention=True).ops(of)
    assert first.paged_attn is eager.paged_attn and first.gemm is eager.gemm
    assert first.moe_mlp is eager.moe_mlp
    assert first.fused_tokens == first.projected_tokens == 0
    assert repr(attention.paged_attn) == "<kernelcat.reference paged_attn>"
    assert attention.gemm is eager.gemm
    grouped = Setup(True, True, GROUPED).ops(of)
    assert isinstance(grouped.moe_mlp, GroupedExperts) and grouped.fused_tokens == 64
    assert grouped.projected_tokens == 128
    last = Setup(True, True, FUSED, has_fp8_projections=True, has_fp8_head=True).ops(of)
    assert isinstance(last.gemm, fp8_products.Fp8Gemm)
    assert last.fused_tokens == last.projected_tokens == 0
    assert isinstance(last.lm_head, fp8_products.Fp8Head)
    assert repr(last.moe_mlp) == "<kernelcat.reference moe_mlp>"
    fp8 = Setup(has_fp8_cache=True)
    assert fp8.cache_dtype(of) == "float8_e4m3fn"
    assert fp8.cache_dtype(model("deepseek-v3")) == "uint8" and Setup().cache_dtype(of) == ""


@pytest.fixture(scope="module")
def climbed() -> list[Result]:
    return climb(source(), PLAN)


def test_every_rung_runs_on_a_cpu_or_says_why_not(climbed: list[Result]) -> None:
    assert [result.name for result in climbed] == [rung.name for rung in RUNGS]
    reasons = {result.name: result.reason for result in climbed if result.reason}
    assert reasons.keys() == {"CUDA graphs", "dependent launches"}
    assert all("needs a GPU" in reason for reason in reasons.values())
    before = ""
    for result in climbed:
        if result.reason:
            assert not result.decoding and result.ttft_ms is None and not result.previous
            continue
        assert [one.batch for one in result.decoding] == [1, 2] and result.ttft_ms
        assert result.previous == before and result.memory_bytes is None
        before = result.name


def test_effects_are_ratios_to_the_rung_before(climbed: list[Result]) -> None:
    ran = [result for result in climbed if not result.reason]
    assert not ran[0].effects and ran[0].ttft_effect is None
    for before, result in pairwise(ran):
        for a, b in zip(before.decoding, result.decoding, strict=True):
            assert result.effects[a.batch] == b.tokens_per_second / a.tokens_per_second
        assert before.ttft_ms and result.ttft_ms
        assert result.ttft_effect == before.ttft_ms / result.ttft_ms


def test_float8_alone_changes_what_is_written(climbed: list[Result]) -> None:
    found = {result.name: result for result in climbed if not result.reason}
    assert {result.reference for result in found.values()} == {"fused MoE"}
    assert found["fused MoE"].divergence == 0
    for name in ("eager torch", "paged attention", "fused products", "MXFP4 experts"):
        divergence = found[name].divergence
        assert divergence is not None and 0 <= divergence < 1e-9
    cache, projections, head = (
        found[name].divergence for name in ("FP8 cache", "FP8 attention", "FP8 lm_head")
    )
    assert cache and projections and head and 1e-5 < cache < projections != head
    assert found["prefix cache"].divergence == found["speculation"].divergence == head
    assert found["speculation"].accepted is not None and found["prefix cache"].accepted is None


def test_a_rung_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: GroupedExperts, *args: object, **named: object) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(GroupedExperts, "__call__", fail)
    told: list[str] = []
    names = ("fused products", "MXFP4 experts", "fused MoE")
    found = climb(source(), PLAN, names, lambda result: told.append(result.name))
    assert told == [rung.name for rung in RUNGS]
    by_name = {result.name: result for result in found}
    assert by_name["MXFP4 experts"].reason == "RuntimeError: no such kernel"
    assert by_name["fused MoE"].previous == "fused products"
    assert by_name["fused MoE"].effects and by_name["speculation"].reason == "not asked for"


def test_a_lost_device_ends_the_ladder_and_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = ladder.free, list[str]()

    def lost(device: str) -> None:
        calls.append(device)
        if len(calls) > 5:  # after loading and two rungs
            raise RuntimeError("CUDA error: an illegal memory access\nCompile with ...")
        real(device)

    monkeypatch.setattr(ladder, "free", lost)
    found = climb(source(), PLAN)
    ran = [result for result in found if not result.reason]
    assert [result.name for result in ran] == ["eager torch", "paged attention"]
    assert found[2].short_reason == "RuntimeError: CUDA error: an illegal memory access"
    for result in found[3:]:
        assert result.reason.startswith("rung 'fused products' has lost the device")
        assert "\n" not in result.short_reason
    assert all(result.divergence is not None for result in ran)


def test_steps_are_padded_to_measured_batches() -> None:
    for batches, mixed in (((1, 8, 64), [1, 8, 64]), ((4,), [4]), ((1, 2), [1, 2])):
        plan = Plan(batches)
        sizes = StepSizes(plan.limits(), 0, plan.batch_sizes())
        assert set(batches) <= set(sizes.batches) and sizes.mixed_batches == mixed


def test_rungs_that_are_not_measured_are_part_of_later_ones() -> None:
    found = climb(source(), PLAN, ("speculation", "fused MoE"))
    ran = [result for result in found if not result.reason]
    assert [result.name for result in ran] == ["fused MoE", "speculation"]
    assert ran[1].previous == "fused MoE"
    assert ran[1].divergence is not None and ran[1].divergence > 1e-5  # with its float8 parts
    assert ran[1].reference == "fused MoE"
    only = climb(source(), PLAN, ("FP8 cache",))
    (result,) = [result for result in only if not result.reason]
    assert result.divergence is None and not result.previous


def test_a_dense_model_has_no_rungs_of_experts() -> None:
    found = climb(source("llama"), PLAN, ("MXFP4 experts", "fused MoE", "FP8 cache"))
    reasons = {result.name: result.reason for result in found}
    assert reasons["MXFP4 experts"] == reasons["fused MoE"] == "the model has no experts"
    assert reasons["FP8 cache"] == ""


def test_unknown_rungs_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"no rung called 'CUDA graph'.*CUDA graphs"):
        climb(source(), PLAN, ("CUDA graph",))


def test_settings_of_a_rung_reach_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineSettings] = []

    class Watched(Engine):
        def __init__(self, model: moe.Decoder, settings: EngineSettings) -> None:
            seen.append(settings)
            super().__init__(model, settings)

    monkeypatch.setattr(ladder, "Engine", Watched)
    climb(source(), PLAN, ("fused MoE", "speculation"))
    first, last = seen
    assert not (
        first.has_graphs or first.has_prefix_cache or first.speculation or first.cache_dtype
    )
    assert last.has_prefix_cache and last.speculation and last.speculation.num_drafts == 4
    assert last.cache_dtype == "float8_e4m3fn"


# ---- what the ladder asks of engine and bench ---------------------------------------------------


@pytest.mark.parametrize("context", [16, 17, 60, 64])
def test_enough_pages_keep_no_request_waiting(context: int) -> None:
    of = model("gpt-oss")
    limits = Limits(256, 3, 3, context)
    pages = tuple(enough(moe.windows(of.cache_layers), 16, limits))
    served = Engine(of, EngineSettings(limits, page_size=16, num_pages=pages))
    for start in range(3):
        served.submit(list(range(start, start + context - 6)))
    served.step()
    assert served.statistics().requests_running == 3
    while served.has_work:
        served.step()
    assert served.statistics().preemptions_total == 0


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_the_first_token_is_timed_with_a_prompt_whose_beginning_is_known(
    has_prefix_cache: bool,
) -> None:
    of = model("llama")
    settings = EngineSettings(
        Limits(128, 1, 1, 65), page_size=16, num_pages=(12,), has_prefix_cache=has_prefix_cache
    )
    served = Engine(of, settings)
    assert time_first_token(served, 64, num_rounds=2) > 0
    found = served.statistics()
    assert found.prompt_tokens_total == 4 * 64 and found.output_tokens_total == 4
    assert found.cached_tokens_total == (3 * 48 if has_prefix_cache else 0)


# ---- what people see ----------------------------------------------------------------------------


def results() -> Iterator[Result]:
    def decoding(rate: float) -> tuple[Decoding, ...]:
        return (Decoding("kernelcat", 8, 64, 5, rate, 1.0, 1.0, [rate]),)

    first = Result("eager torch", "slow", decoding=decoding(50.0), ttft_ms=20.0, divergence=2e-7,
                   reference="eager torch", memory_bytes=40_300_000_000)  # fmt: skip
    yield first
    yield Result("CUDA graphs", "fast", "OutOfMemoryError: <b>no & memory</b>")
    fused = Result("fused MoE", "fused", decoding=decoding(125.0), ttft_ms=5.0, accepted=0.25)
    yield fused.after(first)


def test_the_table_has_a_line_for_each_rung() -> None:
    sheet = ladder_report.sheet(list(results()), "a title")
    assert sheet.headers[:3] == ("rung", "tokens/s at 8", "×")
    assert sheet.lines[0] == ["eager torch", "50.0", "", "20.0", "", "40.3", "2.0e-07", ""]
    assert sheet.lines[1][0] == "CUDA graphs" and set(sheet.lines[1][1:-1]) == {""}
    assert sheet.lines[1][-1] == "not run: OutOfMemoryError: <b>no & memory</b>"
    assert sheet.lines[2][1:5] == ["125.0", "2.50", "5.0", "4.00"]
    assert sheet.lines[2][-1] == "25% of drafts accepted"
    assert any("'eager torch'" in note for note in sheet.notes)


def test_the_picture_shows_every_rung_and_escapes_reasons() -> None:
    picture = ladder_report.to_svg(list(results()), "a <title>")
    drawn = minidom.parseString(picture)
    words = [text.firstChild.data for text in drawn.getElementsByTagName("text")]
    for word in ("a <title>", "eager torch", "CUDA graphs", "fused MoE", "50", "125", "batch 8"):
        assert word in words
    assert "not run: OutOfMemoryError: <b>no & memory</b>" in words
    marks = [mark for mark in drawn.getElementsByTagName("circle") if float(mark.getAttribute("cy"))
             < ladder_report.TOP + 3 * ladder_report.ROW]  # fmt: skip
    xs = [float(mark.getAttribute("cx")) for mark in marks]
    assert len(xs) == 2 and xs[0] < xs[1]
    nothing = [Result("eager torch", "slow", "no GPU")]
    assert "no GPU" in ladder_report.to_svg(nothing, "nothing ran")


COMMAND = [
    "moe", "ladder", "small-gpt-oss", "--random-weights", "--device", "cpu", "--batches", "1",
    "--context", "20", "--tokens", "3", "--rounds", "1", "--kl-prompts", "1",
    "--rung", "eager torch", "--rung", "CUDA graphs", "--rung", "FP8 cache",
]  # fmt: skip


def test_the_command_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    plot = tmp_path / "ladder.svg"
    out = tmp_path / "ladder.json"
    done = CliRunner().invoke(main, [*COMMAND, "--json", "--plot", str(plot), "--out", str(out)])
    assert out.read_text() == done.stdout
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == "small-gpt-oss" and found["plan"]["context"] == 20
    by_name = {rung["name"]: rung for rung in found["rungs"]}
    assert len(by_name) == len(RUNGS)
    assert by_name["FP8 cache"]["previous"] == "eager torch"
    assert by_name["FP8 cache"]["effects"]["1"] > 0 and by_name["FP8 cache"]["divergence"] > 0
    assert "needs a GPU" in by_name["CUDA graphs"]["reason"]
    assert "eager torch: " in done.stderr and "CUDA graphs: not run: " in done.stderr
    assert "FP8 cache" in plot.read_text()
    done = CliRunner().invoke(main, COMMAND)
    assert done.exit_code == 0, done.output
    for word in ("eager torch", "not asked for", "needs a GPU", "KL"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rung", "fused"], "no rung called 'fused'"),
        (["--batches", "0"], "must be positive numbers"),
        (["--tokens", "1"], "at least 2"),
        (
            ["--batches", "40", "--context", "100", "--step-tokens", "50", "--tokens", "9"],
            "too few",
        ),
        (["--kl-prompts", "0"], "positive"),
        (["--plot", "/nowhere/ladder.svg"], "/nowhere/ladder.svg cannot be written"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, [*COMMAND, *options])
    assert done.exit_code == 1 and message in done.output
