"""`paged_attn/cuda/registers`: on the host, where clusters run too, and what it refuses."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from cuda_host import HostCuda

from kernelcat import catalog
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.reference.paged_attn import FP8, attention
from kernelcat.runtime import gpu
from kernelcat.verify import gate

H200 = gpu.find("h200")
ENTRY = catalog.entry("paged_attn")
REGISTERS = catalog.implementation("paged_attn", "cuda", "registers")


def config(tokens: int, num_warps: int, cluster: int = 1, blocks_per_sm: int = 1) -> Config:
    return Config(tokens=tokens, num_warps=num_warps, cluster=cluster, blocks_per_sm=blocks_per_sm)


CASES = {
    "a cluster, in two passes": (
        attention(6, 8, 1, 64, 208, 16, has_sinks=True, softcap=3.0), config(16, 2, 4),
        (1, 1, 1, 1, 0, 1), (0, 1, 16, 33, 64, 208),
    ),
    "a window, two queries": (
        attention(
            5, 12, 2, 128, 128, 32, q_len=2, window=40, has_sinks=True, has_scales=True,
            dtype="float16", kv_dtype="float16",
        ),
        config(32, 2), (2, 2, 1, 0, 2), (2, 41, 42, 0, 128),
    ),
    "a window in a long table of short pages": (
        attention(3, 5, 1, 64, 300, 1, window=70), config(64, 2, 2), (1, 1, 1), (71, 300, 3),
    ),
}  # fmt: skip
"""A problem, a configuration, and new tokens and all tokens of each sequence."""


def entry_of(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> Any:
    """The entry with sequences of these lengths, NaN beyond them, and sinks of -infinity."""

    def make_inputs(problem: Problem, normal: Any) -> dict[str, Any]:
        inputs = ENTRY.make_inputs(problem, normal)
        inputs["kv_lens"][:] = kv_lens
        inputs["cu_q"][:] = [0, *accumulate(q_lens)]
        size = problem["page_size"]
        for pages, kv_len in zip(inputs["block_table"], kv_lens, strict=True):
            for token in range(kv_len, problem["table_width"] * size):
                for name in ("k_cache", "v_cache"):
                    inputs[name][pages[token // size], token % size] = np.nan
        if problem["has_sinks"]:
            inputs["sinks"][1::3] = -np.inf
        return inputs

    def oracle(problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
        """Zeros for a head without visible keys whose sink is -infinity."""
        with np.errstate(invalid="ignore"):
            results = ENTRY.oracle(problem, arrays)
        results["out"][results["lse"] == -np.inf] = 0
        return results

    return replace(ENTRY, make_inputs=make_inputs, oracle=oracle)


@pytest.fixture(scope="module")
def device() -> HostCuda:
    return HostCuda()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_on_the_host(name: str, device: HostCuda) -> None:
    even, chosen, q_lens, kv_lens = CASES[name]
    problem = ENTRY.problem(**{**even.values, "tokens": sum(q_lens)})
    assert REGISTERS.why_not(chosen, problem, H200) is None
    prepared = gate.prepare(entry_of(q_lens, kv_lens), problem, device)
    verdict = prepared.verify(device.load(REGISTERS, problem, chosen))
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_dtype": FP8}, "must be bfloat16"),
        ({"q_len": 3}, "24 rows are more than the 16"),
        ({"has_scales": True, "page_scales": True}, "scales of pages"),
    ],
)
def test_what_registers_cannot_hold_is_refused(changes: dict[str, Any], reason: str) -> None:
    problem = attention(1, 64, 8, 64, 3008, 16, **changes)
    assert reason in str(REGISTERS.why_not(config(32, 4), problem, H200))


def test_accumulators_that_exceed_static_shared_memory_are_refused() -> None:
    problem = attention(1, 64, 8, 128, 3008, 16)
    assert "static shared memory" in str(REGISTERS.why_not(config(16, 16), problem, H200))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode-1x3008-64/8x64-p16-sinks", config(64, 8, 8)),
        ("decode-1x3008-64/8x64-p16-window128-sinks", config(32, 4)),
        ("decode-64x1024-64/8x64-p16-window128-sinks", config(32, 4, 1, 4)),
    ],
)
def test_few_tokens_are_loaded_at_once(name: str, expected: Config) -> None:
    """Every warp has one tile at most, and all thread blocks run at the same time."""
    assert REGISTERS.default(ENTRY.problems[name], H200) == expected
