"""`moe_gemm`'s Blackwell kernels in CuTe DSL: right on the host, and what compilers make of them.

No GPU ran them. The roles of their warps run on the host (``cute_moe_blackwell.py``); the way of
the block scales is taken from the kernel's own layouts.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign import RUNS_ALL

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_gemm import ENTRY, product
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

B200 = gpu.find("b200")
MXFP4, FLOAT8 = {"format": "mxfp4", "act_dtype": FP8}, {"format": "fp8", "act_dtype": FP8}
FLOAT16 = {"dtype": "float16", "format": "float16", "act_dtype": "float16"}
BLOCKS = (32, 64, 128)


def variant(name: str) -> Implementation:
    return catalog.implementation("moe_gemm", "cute", name)


def variant_of(problem: Problem) -> Implementation:
    return variant("block_scaled" if problem["format"] == "mxfp4" else "tcgen05")


# ---- on the host ---------------------------------------------------------------------------------

CASES = {
    "mxfp4, gathered, a k-block that overlaps": (
        32, product(10, 2, 2, 144, 320, gather=True, bias=True, activation="swiglu_oai", **MXFP4),
    ),
    "mxfp4, all tokens to one of four experts": (
        32, product(40, 1, 4, 130, 128, skew="hot", activation="swiglu", **MXFP4),
    ),
    "mxfp4, sums of odd columns, two warpgroups read": (
        128, product(70, 1, 1, 7, 192, combine=True, bias=True, residual=True, **MXFP4),
    ),
    "float8, gathered": (
        32, product(12, 2, 2, 130, 144, gather=True, activation="swiglu", **FLOAT8),
    ),
    "float8, summed": (64, product(9, 2, 2, 8, 272, combine=True, **FLOAT8)),
    "bfloat16, odd columns": (64, product(40, 1, 1, 129, 80, gather=True, bias=True)),
    "float16, few rows of many experts": (32, product(3, 2, 40, 16, 208, **FLOAT16)),
}  # fmt: skip
"""What is tested -> rows of a tile and problem."""

FAULTS = {
    "forget_the_overlap": (32, product(3, 1, 1, 16, 320, **MXFP4)),
    "shift_the_scales": (32, product(3, 1, 1, 16, 128, **MXFP4)),
    "gather_in_order": (32, product(6, 2, 5, 16, 128, gather=True, **FLOAT8)),
    "release_too_early": (32, product(3, 1, 1, 16, 64)),
}


def verdicts_of(cases: dict[str, tuple[int, Problem]], *faults: str) -> dict[str, list[Any]]:
    """Name -> whether it passed, the detail and the largest error."""
    script = Path(__file__).with_name("cute_moe_blackwell.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    told = {
        name: (variant_of(problem).variant, {"block_m": block_m}, problem.values)
        for name, (block_m, problem) in cases.items()
    }
    done = subprocess.run(
        [sys.executable, str(script), *faults],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    verdicts: dict[str, list[Any]] = json.loads(done.stdout)
    return verdicts


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Any]]:
    return verdicts_of(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_the_oracle(name: str, verdicts: dict[str, list[Any]]) -> None:
    passed, detail, _ = verdicts[name]
    assert passed, detail


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    cases = {fault: FAULTS[fault]}
    assert verdicts_of(cases)[fault][0]
    assert not verdicts_of(cases, fault)[fault][0]


# ---- layouts -------------------------------------------------------------------------------------


def kernel_of(problem: Problem, block_m: int) -> Any:
    from kernelcat.kernels.cute.moe_gemm.blackwell.product import Product

    implementation = variant_of(problem)
    step = implementation.program(problem, Config(block_m=block_m), B200).steps[0]
    return Product(**dict(step.source.constants))


@pytest.mark.parametrize("block_m", BLOCKS)
def test_products_find_the_scales_where_the_host_looks_for_them(block_m: int) -> None:
    """A stage is one atom, copied to the first four columns; product b uses byte b of a word."""
    import cutlass
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream

    from kernelcat.kernels.cute.common.scale_atoms import to_tensor_memory
    from kernelcat.kernels.cute.common.tensor_memory import cta_group
    from kernelcat.kernels.cute.moe_gemm.blackwell.scales import scale_layouts

    kernel, found = kernel_of(product(64, 1, 1, 128, 256, **MXFP4), block_m), []

    def evaluate() -> None:
        layouts = scale_layouts(kernel.products(), kernel.tiler, kernel.num_stages)
        smem, tmem = cutlass.AddressSpace.smem, cutlass.AddressSpace.tmem
        for s_layout, t_layout in (layouts[:2], layouts[2:]):
            kind = cutlass.Float8E8M0FNU
            sS = cute.make_tensor(cute.make_ptr(kind, 0, smem, assumed_align=1024), s_layout)
            tS = cute.make_tensor(cute.make_ptr(kind, 0, tmem, assumed_align=16), t_layout)
            _, source, target = to_tensor_memory(cta_group(1), sS, tS)
            num_stages = cute.size(source, mode=[4])
            units = [
                cute.crd2idx((0, 0, 0, 0, stage), source.layout) for stage in range(num_stages)
            ]
            sizes = [cute.size(target, mode=[mode]) for mode in (1, 2, 3)]
            places = [cute.crd2idx((0, 0, block), t_layout) for block in range(4)]
            found.append((units, sizes, places))

    @cute.jit
    def trace(stream):
        evaluate()

    cute.compile(trace, CUstream(0), options="--gpu-arch sm_100a")
    for (units, sizes, places), stages in zip(found, (kernel.num_stages, 1), strict=True):
        assert units == [32 * stage for stage in range(stages)], "512 bytes in units of 16"
        assert sizes == [1, 1, 1] and places == [0, 1, 2, 3]


FORMATS = {"mxfp4": MXFP4, "fp8": FLOAT8, "bfloat16": {}}


@pytest.mark.parametrize("block_m", BLOCKS)
@pytest.mark.parametrize("format", FORMATS)
def test_memories_hold_what_a_tile_needs(format: str, block_m: int) -> None:
    kernel = kernel_of(product(64, 8, 256, 4096, 7168, **FORMATS[format]), block_m)
    operands = (128 + block_m) * 128 * kernel.num_stages
    atoms = kernel.num_stages + 1 if format == "mxfp4" else 0
    scales = 512 * atoms + 4 * 4 * block_m + 8 * 257
    assert kernel.num_stages >= 5 and operands + scales + 4096 <= B200.shared_bytes
    columns = kernel.num_accumulators * block_m + (8 if format == "mxfp4" else 0)
    assert kernel.num_accumulators >= 2 and columns <= kernel.num_columns <= 512


# ---- compiled ------------------------------------------------------------------------------------


def compiled(problem: Problem, **config: int) -> list[Any]:
    implementation = variant_of(problem)
    chosen = Config(implementation.default(problem, B200), **config)
    assert implementation.why_not(chosen, problem, B200) is None
    steps = implementation.program(problem, chosen, B200).steps
    artifacts = [jit.build(step.source, B200.arch) for step in steps]
    for step, artifact in zip(steps, artifacts, strict=True):
        assert len(step.source.params) == len(step.params)
        assert artifact.metadata["spill_bytes"] == 0 and artifact.metadata["registers"] <= 255
    return artifacts


def reports_of_waiting(artifacts: list[Any]) -> list[inspect.Report]:
    """The reports of ``artifacts``, each of which must wait for the kernel before."""
    reports = inspect.inspect_all(artifacts)
    assert all(report.has("ACQBULK") for report in reports)
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_gathering_products_compile_without_spills(format: str) -> None:
    axes = {"gather": True, "activation": "swiglu_oai", "bias": True, **FORMATS[format]}
    problem = product(1024, 4, 32, 5760, 2880, **axes)
    artifacts = [artifact for rows in BLOCKS for artifact in compiled(problem, block_m=rows)]
    for block_m, report in zip(BLOCKS, reports_of_waiting(artifacts), strict=True):
        opcodes = report.opcodes
        assert opcodes["UTCHMMA" if format == "bfloat16" else "UTCQMMA"] == 4, opcodes
        k_blocks = 2 if format == "mxfp4" else 1  # the last one is loaded by itself
        assert opcodes["UTMALDG.2D.GATHER4"] == k_blocks * block_m // 4
        copies = [count for opcode, count in opcodes.items() if opcode.startswith("UTCCP")]
        assert sum(copies) == (2 if format == "mxfp4" else 0), "of W in a loop, of A before it"


SUMMED = [
    case for case in itertools.product((2880, 135), BLOCKS)
    if RUNS_ALL or case in ((2880, 32), (135, 64), (2880, 128))
]  # fmt: skip
"""Columns, and rows of a tile: without a campaign, each value at least once."""


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("format", FORMATS)
def test_summed_products_compile_without_spills(format: str) -> None:
    axes = {"combine": True, "residual": True, "bias": True, **FORMATS[format]}
    artifacts = []
    for n, block_m in SUMMED:
        artifacts += compiled(product(1024, 4, 32, n, 2880, **axes), block_m=block_m)
    assert len(reports_of_waiting(artifacts)) == 2 * len(SUMMED)


# ---- which problems, and how ---------------------------------------------------------------------


def program_of(problem: Problem, **config: int) -> Program:
    implementation = variant_of(problem)
    chosen = Config(implementation.default(problem, B200), **config)
    assert implementation.why_not(chosen, problem, B200) is None
    return implementation.program(problem, chosen, B200)


@pytest.mark.parametrize("axes", (MXFP4, FLOAT8, FLOAT16), ids=str)
def test_nothing_to_do_is_no_launch(axes: dict[str, str]) -> None:
    assert not program_of(product(0, 2, 3, 16, 128, **axes)).steps
    assert not program_of(product(5, 2, 3, 0, 128, combine=True, **axes)).steps


REFUSED = {
    "format=nvfp4": ("block_scaled", product(5, 2, 3, 16, 128, format="nvfp4", act_dtype=FP8)),
    "act_dtype=bfloat16": ("block_scaled", product(5, 2, 3, 16, 128, format="mxfp4")),
    "Use packing=rows": ("block_scaled", product(5, 2, 3, 16, 128, packing="tiles", **MXFP4)),
    "K=96 must be a multiple of 64": ("block_scaled", product(5, 2, 3, 16, 96, **MXFP4)),
    "K=64 must be a multiple of 64, at least 128": (
        "block_scaled", product(5, 2, 3, 16, 64, **MXFP4),
    ),
    "K=0": ("tcgen05", product(5, 2, 3, 16, 0)),
    "weights in fp8 and activations in bfloat16": (
        "tcgen05", product(5, 2, 3, 16, 64, format="fp8"),
    ),
    "stored without an activation": (
        "tcgen05", product(5, 2, 3, 16, 64, combine=True, activation="swiglu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    name, problem = REFUSED[reason]
    implementation = variant(name)
    config = implementation.default(problem, B200)
    assert reason in str(implementation.why_not(config, problem, B200))


@pytest.mark.parametrize("name", ENTRY.problems)
def test_grids_fill_the_gpu_and_defaults_suit_the_rows_of_an_expert(name: str) -> None:
    problem = ENTRY.problems[name]
    for implementation in (variant("block_scaled"), variant("tcgen05")):
        for config in implementation.configs(problem, B200):
            steps = implementation.program(problem, config, B200).steps
            assert steps[0].grid == (B200.sms, 1, 1) and len(steps) == 1 + problem["combine"]
            assert implementation.estimate(problem, config, B200) > 0
            assert all(step.programmatic for step in steps)
    tcgen05 = variant("tcgen05")
    if tcgen05.why_not(tcgen05.default(problem, B200), problem, B200) is None:
        rows = problem["tokens"] * problem["top_k"] / problem["experts"]
        suited = (32,) if rows <= 8 else (64, 128) if rows <= 64 else (128,)
        assert tcgen05.default(problem, B200)["block_m"] in suited
