"""moe_mlp: CUDA and Triton kernels on the CPU, and what their programs launch."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_fibers import COMPILER, Host

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config, Pointer, Program, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.moe_mlp import grouped, naive, single, stream
from kernelcat.kernels.triton.moe_gemm import TILED, TMA
from kernelcat.kernels.triton.moe_mlp import few
from kernelcat.kernels.triton.moe_mlp import grouped as triton_grouped
from kernelcat.reference import _layer_routing
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_mlp import ENTRY, layer
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")
TILES = {"packing": "tiles"}
SIGMOID = {"score": "sigmoid", "correction": True, "groups": 4, "top_groups": 2, "scaling": 2.5}
GPTOSS = {"bias": True, "residual": True}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")


def config(col_tiles: int, row_tiles: int, team: int, depth: int) -> Config:
    return Config(col_tiles=col_tiles, row_tiles=row_tiles, team=team, depth=depth)


def unknown_tensors(program: Program) -> set[str]:
    """Names in launches that are neither tensors of the entry nor workspaces."""
    params = (param for step in program.steps for param in step.params)
    names = {param.tensor for param in params if isinstance(param, Pointer | TensorMap)}
    return names - {tensor.name for tensor in ENTRY.tensors} - program.workspaces.keys()


def passes(implementation, problem: Problem, chosen: Config, blocks: int = 3) -> bool:
    assert ENTRY.constraint(problem) is None
    host = Host(blocks)
    assert implementation.illegal(chosen, problem, host.gpu) is None
    prepared = gate.prepare(ENTRY, problem, host, 1)
    return prepared.verify(host.load(implementation, problem, chosen)).passed


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        # Two passes of an expert with 20 tokens, thread blocks that share an expert, and a launch
        # that routes.
        (
            layer(
                20, 3, 6, 160, 160, format="mxfp4", skew="hot", bias=True, residual=True,
                activation="swiglu_oai", **TILES,
            ),
            config(1, 2, 2, 4),
        ),
        (layer(33, 2, 6, 192, 144, format="nvfp4", **TILES), config(4, 1, 16, 3)),
        (layer(5, 5, 5, 272, 224, bias=True), config(1, 1, 8, 3)),
        (layer(9, 2, 8, 272, 144, format="fp8", skew="zipf"), config(2, 1, 4, 2)),
        (layer(12, 2, 8, 272, 208, format="fp8", act_dtype=FP8, **SIGMOID), config(1, 1, 2, 3)),
        # Thread blocks share the four passes of an expert, and must agree on their assignments.
        (layer(32, 2, 2, 128, 64, format="fp8"), config(1, 1, 2, 2)),
    ],
    ids=["mxfp4-hot", "nvfp4", "16-bits", "fp8", "fp8-float8-groups", "shared-passes"],
)  # fmt: skip
def test_stream_multiplies_on_the_host(problem: Problem, chosen: Config) -> None:
    assert passes(stream.IMPLEMENTATION, problem, chosen)


def one_token(first_depth: int, second_depth: int, cluster: int) -> Config:
    return Config(first_depth=first_depth, second_depth=second_depth, cluster=cluster)


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (layer(1, 4, 8, 192, 320, format="mxfp4", **GPTOSS, **TILES), one_token(8, 4, 1)),
        (layer(1, 4, 8, 192, 320, format="mxfp4", **GPTOSS, **TILES), one_token(3, 2, 2)),
        (layer(1, 3, 5, 272, 224, bias=True), one_token(2, 3, 4)),
        (layer(1, 2, 6, 192, 144, format="nvfp4", **TILES), one_token(4, 4, 2)),
        (layer(1, 2, 8, 272, 144, format="fp8", **SIGMOID), one_token(2, 2, 2)),
    ],
    ids=["mxfp4", "mxfp4-clusters", "16-bits-clusters-of-4", "nvfp4", "fp8-groups"],
)
def test_single_multiplies_on_the_host(problem: Problem, chosen: Config) -> None:
    # With all thread blocks: how many items one has is a number of the launch.
    assert passes(single.IMPLEMENTATION, problem, chosen, blocks=H200.sms)


def test_one_token_takes_two_launches_that_fit_on_an_sm_together() -> None:
    problem = layer(1, 4, 32, 2880, 2880, format="mxfp4", **TILES)
    candidates = [
        config
        for config in single.IMPLEMENTATION.legal(problem, H200)
        if not single.IMPLEMENTATION.unpromising(config, problem, H200)
    ]
    assert candidates
    for chosen in candidates:
        first, second = single.IMPLEMENTATION.program(problem, chosen, H200).steps
        # An SM keeps 1 KB of its 228 KB for each thread block.
        assert first.shared_bytes + second.shared_bytes + 2048 <= 228 * 1024
        assert 2 * (first.shared_bytes + 1024) > 228 * 1024
        assert first.max_carveout and second.max_carveout


@needs_compiler
@pytest.mark.parametrize(
    "problem",
    [
        layer(3, 2, 8, 144, 32, format="fp8", act_dtype=FP8, bias=True, residual=True, **SIGMOID),
        layer(3, 2, 4, 64, 32, format="mxfp4", act_dtype=FP8, renormalize=False),
    ],
    ids=["fp8", "mxfp4-rows"],
)
def test_naive_multiplies_on_the_host(problem: Problem) -> None:
    assert passes(naive.IMPLEMENTATION, problem, Config())


@pytest.mark.parametrize(("tokens", "num_launches"), [(1, 3), (16, 3), (17, 4)])
def test_few_tokens_are_routed_inside_of_the_products(tokens: int, num_launches: int) -> None:
    problem = layer(tokens, 4, 32, 2880, 2880, format="mxfp4", **TILES)
    chosen = stream.IMPLEMENTATION.default(problem, H200)
    assert len(stream.IMPLEMENTATION.program(problem, chosen, H200).steps) == num_launches


@pytest.mark.parametrize(
    ("tokens", "axes", "num_launches"),
    [
        (64, {"format": "mxfp4", **TILES}, 4),
        (512, {}, 4),
        (513, {}, 5),
        (64, {"format": "fp8", "act_dtype": FP8}, 6),
        (4096, {"format": "fp8", "act_dtype": FP8}, 7),
    ],
)
def test_grouped_products_take_few_launches(tokens: int, axes: dict, num_launches: int) -> None:
    """One or two to route, two products, the sum, and two that quantize to float8."""
    problem = layer(tokens, 4, 32, 2880, 2880, **axes)
    chosen = grouped.IMPLEMENTATION.default(problem, H200)
    assert grouped.IMPLEMENTATION.why_not(chosen, problem, H200) is None
    program = grouped.IMPLEMENTATION.program(problem, chosen, H200)
    assert len(program.steps) == num_launches
    assert unknown_tensors(program) == set()


def test_float8_activations_are_judged_by_their_signal() -> None:
    """A right result has 27 dB, and one with a wrong block of scales is refused."""
    problem = layer(40, 2, 4, 160, 96, format="fp8", act_dtype=FP8)
    prepared = gate.prepare(ENTRY, problem, Host(), 1)

    def passes_with(change: float) -> bool:
        def run() -> None:
            out = prepared.expected["out"] * np.float32(1)
            out[:, :128] *= change
            prepared.arrays["out"][...] = dtypes.encode(out, "bfloat16")

        return prepared.verify_run(run).passed

    assert passes_with(1.0)
    assert not passes_with(1.15)


def test_nothing_is_launched_without_tokens() -> None:
    problem = layer(0, 4, 32, 2880, 2880)
    for implementation in catalog.in_language("moe_mlp", "cuda") + catalog.in_language(
        "moe_mlp", "triton"
    ):
        chosen = implementation.default(problem, H200)
        assert implementation.program(problem, chosen, H200).steps == ()


def test_no_token_has_no_groups_to_choose() -> None:
    problem = layer(0, 1, 4, 16, 16, **{**SIGMOID, "groups": 2, "top_groups": 1})
    scores = _layer_routing.clear_logits(
        problem, np.zeros((0, 4), "float32"), np.zeros(4, "float32")
    )
    assert scores.shape == (0, 4)


# ---- Triton --------------------------------------------------------------------------------------

MXFP4, NVFP4 = ({"format": format, **TILES} for format in ("mxfp4", "nvfp4"))
FLOAT8 = {"format": "fp8", "act_dtype": FP8}
HALF = {"dtype": "float16", "act_dtype": "float16"}


def of_few(first_rows: int, second_rows: int, split_k: int, problem: Problem) -> tuple:
    rows = {"first_rows": first_rows, "second_rows": second_rows}
    return ("moe_mlp", "few", {**rows, "split_k": split_k, "stages": 3}, dict(problem.values))


def of_grouped(first_tile: str, second_tile: str, problem: Problem) -> tuple:
    tiles = {"first_tile": first_tile, "second_tile": second_tile}
    return ("moe_mlp", "grouped", {**tiles, "stages": 3}, dict(problem.values))


CASES = {
    "few, mxfp4, an expert of all tokens": of_few(
        64, 128, 1, layer(9, 3, 6, 160, 160, skew="hot", bias=True, residual=True,
                          activation="swiglu_oai", **MXFP4)
    ),
    "few, nvfp4, one token, splits, the last one empty": of_few(
        128, 64, 4, layer(1, 5, 5, 112, 272, bias=True, **NVFP4)
    ),
    "few, mxfp4, float16": of_few(64, 64, 2, layer(2, 2, 4, 96, 288, **MXFP4, **HALF)),
    "few, mxfp4 in rows": of_few(64, 64, 1, layer(3, 2, 4, 96, 64, format="mxfp4", bias=True)),
    "few, 16 bits": of_few(128, 64, 2, layer(16, 1, 1, 80, 144, bias=True, residual=True)),
    "few, fp8": of_few(64, 128, 1, layer(5, 2, 4, 272, 144, format="fp8", bias=True)),
    "few, float8, groups": of_few(64, 64, 2, layer(4, 2, 8, 144, 288, **FLOAT8, **SIGMOID)),
    "few, nothing between the products": of_few(64, 64, 1, layer(4, 2, 4, 48, 0, bias=True)),
    "grouped, mxfp4": of_grouped(
        "16x128x128", "64x128x64", layer(20, 3, 6, 160, 160, skew="hot", bias=True, residual=True,
                                         activation="swiglu_oai", **MXFP4)
    ),
    "grouped, by TMA": of_grouped("32x128x64", "64x256x64", layer(40, 2, 3, 80, 96, bias=True)),
    "grouped, float8": of_grouped("16x128x128", "32x128x64", layer(9, 2, 8, 272, 144, **FLOAT8)),
    "naive, mxfp4 in tiles, float8": (
        "moe_mlp", "naive", {}, dict(layer(1, 2, 4, 64, 32, act_dtype=FP8, **MXFP4).values)
    ),
}  # fmt: skip
TWICE = "few, twice"
RUN_TWICE = """
def run_twice(entry, variant, config, axes):
    # Whether two runs with one set of workspaces agree, and the sum of the counters afterwards.
    problem = catalog.entry(entry).problem(**axes)
    implementation = catalog.implementation(entry, "triton", variant)
    program = implementation.program(problem, Config(config), device.gpu)
    spaces = {name: np.zeros(size, np.uint8) for name, size in program.workspaces.items()}
    arrays = dict(gate.prepare(catalog.entry(entry), problem, device).arrays)
    results = []
    for _ in range(2):
        interpret(replace(program, workspaces={}), {**arrays, **spaces})
        results.append(arrays["out"].copy())
    return bool((results[0] == results[1]).all()), int(spaces["arrivals"].sum())
"""


@pytest.fixture(scope="module")
def results(interpreted) -> dict[str, list]:
    pytest.importorskip("triton")
    again = CASES["few, nvfp4, one token, splits, the last one empty"]
    return interpreted({**CASES, TWICE: (*again, "run_twice")}, RUN_TWICE)


@pytest.mark.parametrize("name", CASES)
def test_a_triton_kernel_is_right_at_its_edges(results, name: str) -> None:
    reason, passed, detail = results[name]
    assert reason is None
    assert passed, detail


def test_few_leaves_its_counters_at_zero(results) -> None:
    assert results[TWICE] == [True, 0]


@pytest.mark.parametrize("name", ["gptoss-1-mxfp4", "dsv3-8-fp8", "qwen3-8-fp8-a8"])
def test_every_launch_of_few_waits_for_the_launch_before(name: str) -> None:
    implementation, problem = few.IMPLEMENTATION, ENTRY.problems[name]
    chosen = implementation.default(problem, H200)
    assert implementation.why_not(chosen, problem, H200) is None
    program = implementation.program(problem, chosen, H200)
    steps = program.steps
    assert unknown_tensors(program) == set()
    assert [step.source.kernel for step in steps] == ["select", "first", "second"]
    assert all(step.programmatic and step.source.constants["DEPENDENT"] for step in steps)


def test_without_a_first_product_the_second_begins_after_the_routing() -> None:
    """`second` reads the ids before its wait: they must be older than the launch before it."""
    implementation, problem = few.IMPLEMENTATION, layer(4, 2, 4, 48, 0, bias=True)
    program = implementation.program(problem, implementation.default(problem, H200), H200)
    assert [step.source.kernel for step in program.steps] == ["select", "second"]
    assert not program.steps[1].programmatic
    assert not program.steps[1].source.constants["DEPENDENT"]


@pytest.mark.parametrize(
    ("tokens", "axes", "kernels"),
    [
        (64, MXFP4, ["select", "tiled", "tiled", "combine"]),
        (513, {}, ["select", "place", "tiled", "tiled", "combine"]),
        (64, FLOAT8, ["quantize", "select", "tiled", "quantize", "tiled", "combine"]),
    ],
)
def test_a_grouped_layer_is_the_programs_of_its_parts(tokens: int, axes: dict, kernels) -> None:
    problem = layer(tokens, 4, 32, 2880, 2880, **axes)
    implementation = triton_grouped.IMPLEMENTATION
    chosen = implementation.default(problem, H200)
    assert implementation.why_not(chosen, problem, H200) is None
    program = implementation.program(problem, chosen, H200)
    assert [step.source.kernel for step in program.steps] == kernels
    waiting = [step.source.kernel for step in program.steps if step.programmatic]
    assert waiting == [kernel for kernel in kernels if kernel != "quantize"]
    assert unknown_tensors(program) == set()


def test_tiles_of_the_grouped_products_are_those_of_their_kernels() -> None:
    """TMA serves weights of the activations' type, and has tiles that other formats lack."""
    implementation = triton_grouped.IMPLEMENTATION
    for axes, tile, reason in (
        ({}, "16x64x128", "must be one of"),
        (MXFP4, "64x256x64", "must be one of"),
        (FLOAT8, "64x256x64", None),
    ):
        chosen = Config(first_tile=tile, second_tile="128x128x64", stages=4)
        why = implementation.why_not(chosen, layer(64, 4, 32, 2880, 2880, **axes), H200)
        assert why is reason or reason in why
    assert set(triton_grouped.TILES) == {*TILED.space["tile"], *TMA.space["tile"]}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (layer(17, 4, 32, 2880, 2880), "tokens=17 are more than the 16"),
        (layer(4, 4, 32, 2880, 2880, act_dtype=FP8, **MXFP4), "float8 weights only"),
        (layer(4, 17, 32, 2880, 2880), "the router: top_k=17"),
    ],
)
def test_few_is_illegal_with_a_reason(problem: Problem, reason: str) -> None:
    chosen = Config(first_rows=64, second_rows=64, split_k=1, stages=3)
    assert reason in (few.IMPLEMENTATION.why_not(chosen, problem, H200) or "")
