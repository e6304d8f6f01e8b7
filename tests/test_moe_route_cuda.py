"""CUDA kernels of `moe_route` on the host."""

from __future__ import annotations

import shutil

import pytest
from cuda_host import HostCuda

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.reference.moe_route import routed
from kernelcat.runtime import gpu
from kernelcat.verify import gate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
DEEPSEEK = {
    "score": "sigmoid", "renormalize": True, "correction": True, "groups": 8, "top_groups": 4,
    "scaling": 2.5,
}  # fmt: skip
REROUTE = {"overflow": "reroute"}
PRODUCT = {"product": True, "dtype": "bfloat16"}
CASES = {
    "naive": ("naive", {}, (37, 40, 5), {"capacity_factor": 0.5, "load": True}),
    "naive, groups": ("naive", {}, (20, 64, 6), DEEPSEEK),
    "naive, rerouted product": (
        "naive", {}, (37, 12, 5),
        {"product": True, "hidden": 30, "capacity_factor": 1.0, **REROUTE},
    ),
    "one thread block": ("bitmask", {"block_tokens": 128}, (70, 8, 8), {"skew": "equal"}),
    "a cluster of 8": (
        "bitmask", {"block_tokens": 8}, (37, 40, 5),
        {"capacity_factor": 0.5, "skew": "zipf", "load": True, "dtype": "bfloat16"},
    ),
    "no tokens": ("bitmask", {"block_tokens": 4}, (0, 40, 4), {"load": True}),
    "groups": ("bitmask", {"block_tokens": 64}, (70, 64, 6), DEEPSEEK),
    "groups of seven experts": (
        "bitmask", {"block_tokens": 8}, (20, 35, 3), {**DEEPSEEK, "groups": 5, "top_groups": 2},
    ),
    "groups of 20 experts in eight lanes": (
        "bitmask", {"block_tokens": 16}, (20, 60, 4), {**DEEPSEEK, "groups": 3, "top_groups": 2},
    ),
    "groups of one expert": (
        "bitmask", {"block_tokens": 8}, (20, 24, 3),
        {**DEEPSEEK, "groups": 24, "top_groups": 3, "renormalize": False},
    ),
    "corrections of half a vector of logits": (
        "bitmask", {"block_tokens": 16}, (40, 256, 8),
        {**DEEPSEEK, "dtype": "bfloat16", "groups": 1, "skew": "zipf"},
    ),
    "512 experts": (
        "bitmask", {"block_tokens": 16}, (33, 500, 16),
        {"dtype": "float16", "skew": "hot", "capacity_factor": 1.25},
    ),
    "two launches": (
        "bitmask", {"block_tokens": 64}, (600, 24, 3),
        {"dtype": "float16", "skew": "hot", "capacity_factor": 1.25, "load": True},
    ),
    "two launches, groups": ("bitmask", {"block_tokens": 128}, (513, 256, 8), DEEPSEEK),
    "rerouted": (
        "bitmask", {"block_tokens": 8}, (37, 40, 5),
        {"capacity_factor": 0.5, "skew": "zipf", "load": True, **REROUTE},
    ),
    "rerouted, groups": (
        "bitmask", {"block_tokens": 16}, (50, 64, 4),
        {"capacity_factor": 1.0, "skew": "hot", **REROUTE, **DEEPSEEK},
    ),
    "no tokens, rerouted": (
        "bitmask", {"block_tokens": 16}, (0, 64, 4), {"capacity_factor": 1.0, **REROUTE},
    ),
    "product": (
        "product", {"splits": 2}, (37, 40, 5),
        {**PRODUCT, "hidden": 200, "router_bias": True, "capacity_factor": 0.5, "load": True},
    ),
    "product, groups": (
        "product", {"splits": 4}, (20, 64, 6), {**PRODUCT, "hidden": 328, **DEEPSEEK},
    ),
    "product, no tokens": ("product", {"splits": 2}, (0, 40, 4), {**PRODUCT, "hidden": 72}),
}  # fmt: skip
CASES |= {
    f"sorted: {name}": ("sorted", *case)
    for name, (variant, *case) in CASES.items()
    if variant == "bitmask"
}


@pytest.fixture(scope="module")
def device() -> HostCuda:
    return HostCuda()


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_and_leaves_its_workspaces_ready(name: str, device: HostCuda) -> None:
    variant, config, (tokens, experts, top_k), axes = CASES[name]
    entry = catalog.entry("moe_route")
    implementation = catalog.implementation("moe_route", "cuda", variant)
    sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "dtype": "float32"}
    problem = entry.problem(**{**sizes, **axes})
    config = Config(config | {"warps": 4}) if config else Config()
    assert implementation.why_not(config, problem, device.gpu) is None
    prepared = gate.prepare(entry, problem, device)
    run = device.load(implementation, problem, config)(prepared.arrays)
    for _ in range(2):  # the second run finds the workspaces as the first one left them
        verdict = prepared.verify_run(run)
        assert verdict.passed, verdict.detail


@pytest.mark.parametrize(
    "problem",
    [routed(512, 500, 16, capacity_factor=1.0, overflow="reroute"), routed(64, 256, 8, **DEEPSEEK)],
    ids=str,
)
def test_lists_of_candidates_stay_in_registers(problem: Problem) -> None:
    variant, target = catalog.implementation("moe_route", "cuda", "sorted"), gpu.find("h200")
    (step,) = variant.program(problem, Config(block_tokens=32, warps=16), target).steps
    metadata = jit.build(step.source, target.arch).metadata
    assert metadata["spill_bytes"] == metadata["stack_bytes"] == 0
