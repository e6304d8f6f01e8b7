"""Triton kernels on fuzzed problems in Triton's interpreter, which has no Gluon; no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kernelcat import catalog
from kernelcat.runtime import driver

KERNELS = [
    pytest.param(i, id=i.name)
    for name in catalog.names()
    for i in catalog.in_language(name, "triton")
    if i.interpretable
]


@pytest.mark.slow
@pytest.mark.skipif(driver.count() > 0, reason="with a GPU, fuzzing runs on the GPU")
@pytest.mark.parametrize("implementation", KERNELS)
def test_a_triton_kernel_is_right_on_random_problems(implementation) -> None:
    command = [sys.executable, "-m", "kernelcat", "fuzz", implementation.entry, "--json"]
    command += ["--language", "triton", "--variant", implementation.variant]
    # Naive kernels launch a program for each row; tiles have at most 128 rows, so 160 exceeds one.
    examples, limit = (5, 40) if implementation.variant == "naive" else (16, 160)
    command += ["--examples", str(examples), "--kernels", "8", "--limit", str(limit)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)[0]["examples"] >= examples
