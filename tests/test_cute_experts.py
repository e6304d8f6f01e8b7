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
    "gathered": product(3, 2, 4, 18, 32, gather=True, bias=True, activation="swiglu_oai"),
    "summed": product(3, 2, 4, 17, 48, combine=True, bias=True, residual=True),
    "no columns of A": product(3, 1, 2, 8, 0, gather=True, bias=True, activation="swiglu"),
    "float8": product(2, 1, 2, 130, 16, **FLOAT8),
    "float8 beside 16 bits": product(2, 1, 2, 8, 144, gather=True, format="fp8"),
    "mxfp4, float16": product(2, 2, 2, 9, 96, format="mxfp4", combine=True, **FLOAT16),
    "mxfp4 in tiles": product(1, 2, 2, 32, 96, format="mxfp4", **TILES),
    "nvfp4 in tiles, float8": product(1, 2, 2, 16, 144, format="nvfp4", act_dtype=FP8, **TILES),
    "nvfp4": product(2, 2, 3, 10, 48, format="nvfp4", skew="hot", activation="swiglu"),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cute_experts.py"))],
        input=json.dumps({name: problem.values for name, problem in CASES.items()}),
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
