"""CuTe's `paged_attn`: who shares a sequence, and machine code that keeps its promises."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.reference.paged_attn import attention
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")
SPLIT = catalog.implementation("paged_attn", "cute", "split")
CLUSTER = catalog.implementation("paged_attn", "cute", "cluster")
BATCH_1 = catalog.entry("paged_attn").problems["decode-1x8192-64/8x64-p16"]


def test_spaces_stay_small_and_defaults_are_legal() -> None:
    dice = random.Random(0)
    for _ in range(200):
        kv_heads = dice.choice([1, 4, 8])
        problem = attention(
            dice.choice([1, 2, 5, 16, 300]), kv_heads * dice.choice([1, 5, 8]), kv_heads,
            dice.choice([64, 128, 256]), dice.randint(0, 20000), dice.choice([1, 16, 64]),
            kv_dtype=dice.choice(["bfloat16", "float8_e4m3fn"]),
        )  # fmt: skip
        for implementation in (SPLIT, CLUSTER):
            configs = list(implementation.configs(problem, H200))
            assert len(configs) <= 40
            assert (implementation.default(problem, H200) in configs) == bool(configs)
            for config in configs:
                assert implementation.estimate(problem, config, H200) > 0
                for step in implementation.program(problem, config, H200).steps:
                    assert step.grid[0] % step.cluster[0] == 0 and step.grid[2] <= 65535


def test_a_cluster_needs_no_workspace_and_serves_only_where_sms_are_idle() -> None:
    config = CLUSTER.default(BATCH_1, H200)
    program = CLUSTER.program(BATCH_1, config, H200)
    assert not program.workspaces
    (step,) = program.steps
    assert step.cluster == (config["splits"], 1, 1)
    assert step.grid == (config["splits"], 8, 1)
    assert not list(CLUSTER.configs(attention(64, 64, 8, 64, 4096, 16), H200))


@pytest.mark.parametrize(
    "config",
    [
        Config(block_n=128, stages=3, splits=16, warps=4),
        Config(block_n=128, stages=6, splits=8, warps=8),
    ],
)
def test_clusters_compile_without_spills_and_prove_their_techniques(config: Config) -> None:
    assert CLUSTER.why_not(config, BATCH_1, H200) is None
    (step,) = CLUSTER.program(BATCH_1, config, H200).steps
    artifact = jit.build(step.source, "sm_90a")
    assert artifact.metadata["spill_bytes"] == 0
    proofs = inspect.prove(CLUSTER, artifact)
    assert all(proofs.values()), proofs


@pytest.mark.parametrize("sku", ["a100", "l40s"])
def test_all_that_is_asked_of_a_split_compiles_for_older_gpus(sku: str) -> None:
    target = gpu.find(sku)
    problem = attention(
        4, 8, 2, 64, 640, 16, q_len=2, window=70, softcap=5.0, has_sinks=True, has_scales=True
    )
    (step,) = SPLIT.program(problem, SPLIT.default(problem, target), target).steps
    assert jit.build(step.source, target.arch).metadata["spill_bytes"] == 0
