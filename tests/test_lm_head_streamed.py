"""`lm_head/cuda/streamed`: machine code, and runs on the host."""

from __future__ import annotations

import corners
import cuda_fibers
import pytest

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.lm_head.streamed import IMPLEMENTATION
from kernelcat.runtime import gpu
from kernelcat.verify import gate

ENTRY = catalog.entry("lm_head")
H200 = gpu.find("h200")


def head(tokens: int, vocab: int, hidden: int, top_k: int = 1, **more: bool | str) -> Problem:
    axes = {"tokens": tokens, "vocab": vocab, "hidden": hidden, "top_k": top_k, **more}
    return ENTRY.problem(**{"dtype": "bfloat16", **axes})


def config(stage_cols: int = 512, num_warps: int = 8, ring_kb: int = 64) -> Config:
    return Config(stage_cols=stage_cols, num_warps=num_warps, ring_kb=ring_kb)


def test_corners_compile_without_spills_and_prove_their_techniques() -> None:
    names = ("1x201088x2880", "8x201088x2880-top16", "8x129280x7168")
    problems = [ENTRY.problems[name] for name in names]
    corners.check((IMPLEMENTATION, p, IMPLEMENTATION.default(p, H200)) for p in problems)


def test_what_it_does_not_serve_has_a_reason() -> None:
    for problem, reason in (
        (head(9, 64, 64), "tokens=9 are more than the 8"),
        (head(1, 64, 60), "hidden=60 must be a multiple of 8"),
    ):
        assert reason in str(IMPLEMENTATION.why_not(config(), problem, H200))


@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (head(1, 4000, 600), config()),  # several rounds, less than a stage for the last columns
        (head(1, 33, 8), config(256)),  # an odd token, one vector
        (head(3, 700, 264, 16), config(256)),
        (head(8, 2500, 520, 5, has_logits=True), config(512, 16)),
        (
            head(5, 90, 96, 16, dtype="float16", has_logits=True, logits_dtype="float16"),
            config(256),
        ),
    ],
)
def test_it_is_right_on_the_host(problem: Problem, config: Config) -> None:
    host = cuda_fibers.Host(max_blocks=1 << 10)
    assert IMPLEMENTATION.why_not(config, problem, host.gpu) is None
    verdict = gate.check(IMPLEMENTATION, problem, config, host, seeds=(0, 1))
    assert verdict.passed, verdict.detail
