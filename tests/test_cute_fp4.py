"""`nvfp4_matmul` in CuTe DSL: right lane by lane on the host, compiled without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.reference.nvfp4_matmul import FP4, FP8, product
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")
TILED = catalog.implementation("nvfp4_matmul", "cute", "tiled")


def case(tile: tuple[int, ...], m: int, n: int, k: int, **axes: str):
    return list(tile), product(m, n, k, **axes).values


CASES = {
    "naive, subnormal scales": case((), 2, 9, 48),
    "naive, float16 by mxfp4": case((), 2, 9, 96, dtype="float16", format="mxfp4"),
    "naive, float8, weights in tiles": case((), 3, 18, 80, dtype=FP8, packing="tiles"),
    "naive, tiles of mxfp4": case((), 2, 17, 96, format="mxfp4", packing="tiles"),
    "naive, both in 4 bits": case((), 2, 130, 80, dtype=FP4),
    "naive, both in 4 bits, mxfp4": case((), 130, 1, 96, dtype=FP4, format="mxfp4"),
    "few rows, past every edge": case((8, 64), 5, 72, 160),
    "mxfp4": case((8, 64), 5, 72, 160, format="mxfp4"),
    "float16": case((16, 64), 13, 40, 160, dtype="float16"),
    "float16 by mxfp4": case((8, 64), 5, 40, 96, dtype="float16", format="mxfp4"),
    "float8": case((16, 128), 13, 40, 160, dtype=FP8),
    "two warps of rows of A": case((128, 128), 70, 40, 160),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    script = Path(__file__).with_name("cute_fp4.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", CASES)
def test_a_kernels_own_source_is_right_lane_by_lane(verdicts, name: str) -> None:
    passed, detail, _ = verdicts[name]
    assert passed, detail


COMPILED = [
    ("h200", product(1, 8192, 8192), {"split_k": 4}),
    ("h200", product(8192, 8192, 8192), {"block_n": 128}),
    ("h200", product(64, 8192, 8192, dtype=FP8), {"block_n": 128, "split_k": 2}),
    ("h200", product(9, 5760, 2880, format="mxfp4", activation="swiglu", bias=True), {}),
    (
        "a100",
        product(128, 4096, 4096, dtype="float16", format="mxfp4"),
        {"block_n": 64, "split_k": 1},
    ),
    ("b200", product(32, 4096, 4096, activation="gelu"), {}),
]


@pytest.mark.parametrize(("sku", "problem", "changes"), COMPILED, ids=str)
def test_it_compiles_without_spills(sku: str, problem, changes) -> None:
    target = gpu.find(sku)
    config = Config(TILED.default(problem, target), **changes)
    assert TILED.why_not(config, problem, target) is None
    (step,) = TILED.program(problem, config, target).steps
    artifact = jit.build(step.source, target.arch)
    proofs = inspect.prove(TILED, artifact)
    assert all(proofs.values()), proofs
    assert artifact.metadata["spill_bytes"] == 0 and artifact.metadata["registers"] <= 255


@pytest.mark.parametrize("name", catalog.entry("nvfp4_matmul").problems)
def test_candidates_are_few_and_few_rows_fill_the_gpu(name: str) -> None:
    problem = catalog.entry("nvfp4_matmul").problems[name]
    configs = list(TILED.configs(problem, H200))
    is_served = problem["dtype"] != FP4 and problem["packing"] == "rows"
    assert bool(configs) == is_served and len(configs) <= 30
    programs = [TILED.program(problem, config, H200) for config in configs]
    for program in programs:
        (step,) = program.steps
        assert len(step.source.params) == len(step.params) and min(step.grid) > 0
    grids = [program.steps[0].grid[0] * program.steps[0].grid[1] for program in programs]
    assert not grids or max(grids) >= 0.9 * H200.sms
