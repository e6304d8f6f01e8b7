"""Triton kernels on fuzzed problems in Triton's interpreter, which has no Gluon; no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from campaign import RUNS_ALL

from kernelcat import catalog
from kernelcat.runtime import driver

VARIANTS = {
    name: variants
    for name in catalog.names()
    if not catalog.entry(name).ranks  # tests/test_ranks_kernels.py runs them
    if (variants := [i.variant for i in catalog.in_language(name, "triton") if i.interpretable])
}
"""Entry -> variants that the interpreter runs, all in one process."""

FUZZED = """
from kernelcat.verify import fuzz

def fuzzed(entry, variant, examples, limit):
    implementation = catalog.implementation(entry, "triton", variant)
    device = Interpreter.serving(implementation)
    result = fuzz.fuzz(implementation, device, examples, limit=limit, kernels=8)
    return result.examples, str(result.failure or "")
"""

pytestmark = pytest.mark.skipif(driver.count() > 0, reason="with a GPU, fuzzing runs on the GPU")


NAIVE, TILED = ((5, 40), (64, 160)) if RUNS_ALL else ((5, 40), (10, 136))
"""Examples and the largest size: tiles have at most 128 rows, naive kernels a program for each."""


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("entry", VARIANTS)
def test_triton_kernels_are_right_on_random_problems(entry: str, interpreted) -> None:
    cases = {
        variant: (entry, variant, *(NAIVE if variant == "naive" else TILED), "fuzzed")
        for variant in VARIANTS[entry]
    }
    results = interpreted(cases, FUZZED)
    assert {variant: failure for variant, (_, failure) in results.items() if failure} == {}
    for variant, (num_examples, _) in results.items():
        assert num_examples >= cases[variant][2], variant


def test_the_command_fuzzes_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "kernelcat", "fuzz", "tma_copy", "--json"]
    command += ["--language", "triton", "--variant", "vectorized", "--examples", "3"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)[0]["examples"] >= 3
