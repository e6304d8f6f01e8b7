"""moe_mlp: CUDA kernels on the CPU, and what their programs launch."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_fibers import COMPILER, Host

from kernelcat import dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.moe_mlp import grouped, naive, stream
from kernelcat.reference import _layer_routing
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_mlp import ENTRY, layer
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")
TILES = {"packing": "tiles"}
SIGMOID = {"score": "sigmoid", "correction": True, "groups": 4, "top_groups": 2, "scaling": 2.5}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")


def config(col_tiles: int, row_tiles: int, team: int, depth: int) -> Config:
    return Config(col_tiles=col_tiles, row_tiles=row_tiles, team=team, depth=depth)


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
    known = {tensor.name for tensor in ENTRY.tensors} | program.workspaces.keys()
    assert {param.tensor for step in program.steps for param in step.params
            if hasattr(param, "tensor")} <= known  # fmt: skip


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
    for implementation in (naive.IMPLEMENTATION, stream.IMPLEMENTATION, grouped.IMPLEMENTATION):
        chosen = implementation.default(problem, H200)
        assert implementation.program(problem, chosen, H200).steps == ()


def test_no_token_has_no_groups_to_choose() -> None:
    problem = layer(0, 1, 4, 16, 16, **{**SIGMOID, "groups": 2, "top_groups": 1})
    scores = _layer_routing.clear_logits(
        problem, np.zeros((0, 4), "float32"), np.zeros(4, "float32")
    )
    assert scores.shape == (0, 4)
