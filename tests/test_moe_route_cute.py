"""`moe_route` in CuTe DSL: right on the host, thread by thread, and compiled without spills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Problem
from kernelcat.reference.moe_route import routed
from kernelcat.runtime import gpu

pytestmark = pytest.mark.slow
DEEPSEEK = {
    "score": "sigmoid", "renormalize": True, "correction": True, "groups": 8, "top_groups": 4,
    "scaling": 2.5,
}  # fmt: skip
REROUTE = {"overflow": "reroute"}
CASES = {
    "naive": ("naive", {}, (7, 20, 5), {"capacity_factor": 0.5, "load": True}),
    "naive, groups": ("naive", {}, (4, 32, 6), DEEPSEEK),
    "naive, rerouted": (
        "naive", {}, (5, 24, 4), {"capacity_factor": 1.0, "skew": "zipf", **DEEPSEEK, **REROUTE},
    ),
    "naive, rerouted product": (
        "naive", {}, (7, 12, 4),
        {
            "product": True, "hidden": 30, "router_bias": True, "capacity_factor": 1.0,
            "skew": "hot", **REROUTE,
        },
    ),
    "naive, no tokens": ("naive", {}, (0, 12, 5), {"load": True}),
    "one thread block": ("bitmask", {"block_tokens": 64}, (9, 8, 8), {"skew": "equal"}),
    "a cluster of 4": (
        "bitmask", {"block_tokens": 4}, (9, 40, 3),
        {"capacity_factor": 0.5, "skew": "zipf", "load": True},
    ),
    "no tokens": ("bitmask", {"block_tokens": 4}, (0, 40, 4), {"load": True}),
    "groups of seven experts": (
        "bitmask", {"block_tokens": 8}, (8, 35, 3), {**DEEPSEEK, "groups": 5, "top_groups": 2},
    ),
    "groups of one expert": (
        "bitmask", {"block_tokens": 8}, (4, 24, 3),
        {**DEEPSEEK, "groups": 24, "top_groups": 3, "renormalize": False},
    ),
    "groups of 20 experts in eight lanes": (
        "bitmask", {"block_tokens": 4}, (6, 60, 4), {**DEEPSEEK, "groups": 3, "top_groups": 2},
    ),
    "sigmoid of all groups": (
        "bitmask", {"block_tokens": 4}, (5, 96, 1),
        {**DEEPSEEK, "groups": 4, "correction": False},
    ),
    "500 experts": ("bitmask", {"block_tokens": 16}, (2, 500, 16), {"scaling": 2.5}),
    "two launches": (
        "bitmask", {"block_tokens": 4}, (34, 6, 2),
        {"skew": "hot", "capacity_factor": 1.25, "load": True},
    ),
    "two launches, two words of tokens": (
        "bitmask", {"block_tokens": 64}, (37, 5, 1), {"skew": "hot"},
    ),
    "rerouted": (
        "bitmask", {"block_tokens": 4}, (7, 12, 3),
        {"capacity_factor": 1.25, "skew": "hot", "load": True, **REROUTE},
    ),
    "rerouted, groups": (
        "bitmask", {"block_tokens": 4}, (5, 48, 3),
        {"capacity_factor": 1.0, "skew": "hot", **DEEPSEEK, **REROUTE},
    ),
    "rerouted, four experts in a lane": (
        "bitmask", {"block_tokens": 4}, (6, 100, 4),
        {"capacity_factor": 1.0, "skew": "hot", **REROUTE},
    ),
    "no tokens, rerouted": (
        "bitmask", {"block_tokens": 16}, (0, 64, 4), {"capacity_factor": 1.0, **REROUTE},
    ),
}  # fmt: skip
CASES |= {
    f"sorted: {name}": ("sorted", *case)
    for name, (variant, *case) in CASES.items()
    if variant == "bitmask"
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[str]]:
    cases = {}
    for name, (variant, config, (tokens, experts, top_k), axes) in CASES.items():
        sizes = {"tokens": tokens, "experts": experts, "top_k": top_k, "dtype": "float32"}
        warps = {"warps": 4} if config else {}
        cases[name] = (variant, {**config, **warps}, {**sizes, **axes})
    script = Path(__file__).with_name("cute_route.py")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_and_leaves_its_workspaces_ready(verdicts, name: str) -> None:
    assert verdicts[name] == ["", ""]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
def test_candidates_are_sorted_by_the_compared_pairs(count: int) -> None:
    """A network that sorts all zeros and ones sorts everything."""
    from kernelcat.kernels.cute.moe_route.sorted_select import compared_pairs

    dice, pairs = random.Random(count), compared_pairs(count)
    numbers = range(1 << count) if count <= 8 else [dice.getrandbits(count) for _ in range(2000)]
    for number in numbers:
        bits = [number >> i & 1 for i in range(count)]
        for i, j in pairs:
            bits[i], bits[j] = max(bits[i], bits[j]), min(bits[i], bits[j])
        assert bits == sorted(bits, reverse=True)


@pytest.mark.parametrize("variant", ["bitmask", "sorted"])
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (routed(512, 500, 16, capacity_factor=1.0, overflow="reroute"), {"warps": 16}),
        (routed(64, 128, 8, dtype="bfloat16", renormalize=True), {"warps": 32}),
        (routed(4096, 256, 8, **DEEPSEEK), {"warps": 4}),
        (routed(64, 256, 8, **DEEPSEEK), {"warps": 32}),
    ],
    ids=str,
)
def test_it_compiles_without_spills(problem: Problem, config: dict[str, int], variant: str) -> None:
    implementation = catalog.implementation("moe_route", "cute", variant)
    chosen, target = Config(block_tokens=32, **config), gpu.find("h200")
    assert implementation.why_not(chosen, problem, target) is None
    for step in implementation.program(problem, chosen, target).steps:
        metadata = jit.build(step.source, target.arch).metadata
        assert metadata["spill_bytes"] == 0 and metadata["registers"] <= 128
