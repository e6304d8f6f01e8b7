"""`moe_gemm` in CuTe DSL: right element by element on the host, compiled without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kernelcat.reference._experts import FP8
from kernelcat.reference.moe_gemm import product

FLOAT8 = {"format": "fp8", "act_dtype": FP8}
FLOAT16 = {"dtype": "float16", "act_dtype": "float16"}
TILES = {"packing": "tiles"}
CASES = {
    "gathered": ("", product(3, 2, 4, 18, 32, gather=True, bias=True, activation="swiglu_oai")),
    "summed": ("", product(3, 2, 4, 17, 48, combine=True, bias=True, residual=True)),
    "no columns of A": ("", product(3, 1, 2, 8, 0, gather=True, bias=True, activation="swiglu")),
    "float8": ("", product(2, 1, 2, 130, 16, **FLOAT8)),
    "float8 beside 16 bits": ("", product(2, 1, 2, 8, 144, gather=True, format="fp8")),
    "mxfp4, float16": ("", product(2, 2, 2, 9, 96, format="mxfp4", combine=True, **FLOAT16)),
    "mxfp4 in tiles": ("", product(1, 2, 2, 32, 96, format="mxfp4", **TILES)),
    "nvfp4 in tiles, float8": (
        "", product(1, 2, 2, 16, 144, format="nvfp4", act_dtype=FP8, **TILES)
    ),
    "nvfp4": ("", product(2, 2, 3, 10, 48, format="nvfp4", skew="hot", activation="swiglu")),
    "tensor cores, gathered": (
        "64x128", product(37, 2, 2, 136, 80, gather=True, bias=True, activation="swiglu_oai")
    ),
    "tensor cores, odd columns": (
        "128x128", product(2, 1, 34, 129, 80, gather=True, bias=True, format="float16", **FLOAT16)
    ),
    "tensor cores, summed": ("128x192", product(33, 2, 2, 135, 64, combine=True, bias=True,
                                                residual=True)),
    "tensor cores, aligned sums": ("64x128", product(5, 5, 5, 16, 64, combine=True)),
    "tensor cores, a hot expert": ("256x128", product(150, 1, 9, 24, 80, gather=True, skew="hot")),
    "tensor cores, float8, gathered": (
        "64x128", product(12, 2, 2, 140, 272, gather=True, activation="swiglu", **FLOAT8)
    ),
    "tensor cores, float8, three groups": ("128x192", product(70, 1, 1, 200, 144, **FLOAT8)),
}  # fmt: skip
"""What is tested -> tile (none for the naive kernel) and problem."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cute_experts.py"))],
        input=json.dumps({name: [tile, problem.values] for name, (tile, problem) in CASES.items()}),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernels_own_source_is_right_on_the_host(verdicts, name: str) -> None:
    passed, detail, _ = verdicts[name]
    assert passed, detail
