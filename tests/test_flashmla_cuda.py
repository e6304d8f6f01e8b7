"""CUDA's `flashmla` and `mla_kv_write`: corners of their spaces, and the parameters of launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from campaign import only_in_campaigns
from cuda_fibers import COMPILER, Host

from kernelcat import catalog
from kernelcat.catalog.implementation import Config, Float32, Int32, TensorMap
from kernelcat.catalog.spec import Problem
from kernelcat.jit import build
from kernelcat.kernels.cuda.flashmla import dealt, mma, pair, wgmma
from kernelcat.kernels.cuda.flashmla.split import num_teams
from kernelcat.reference.flashmla import PACKED_TYPE, latent, sparse, uneven
from kernelcat.reference.mla_kv_write import appended
from kernelcat.runtime import gpu, tensor_map
from kernelcat.verify import gate, inspect

H200 = gpu.find("h200")
CLUSTER = Config(row_tiles=2, cluster=2, least=1, combine=True)
ALONE = Config(row_tiles=1, cluster=1, least=1, combine=False)
HALF = {"dtype": "float16", "kv_dtype": "float16"}
PACKED = {"kv_dtype": PACKED_TYPE}
CORNERS = [
    ("wgmma", latent(1, 4, 128, 4096, 128, **HALF), CLUSTER),
    ("dealt", latent(1, 3000, 128, 3000), Config(row_tiles=4, cluster=2, least=2, combine=True)),
    ("pair", latent(128, 1, 128, 4096), Config(least=1, combine=True)),
    ("pair", latent(1, 4, 128, 4096, 128, **HALF), Config(least=1, combine=False)),
    ("pair", latent(16, 1, 64, 512, 16, **PACKED), Config(least=1, combine=False)),
    ("mma", latent(128, 1, 16, 4096), Config(least=4, combine=True)),
    ("mma", latent(64, 2, 128, 4096, **PACKED), Config(least=4, combine=False)),
]
TWO_ROW_TILES = Config(row_tiles=2, cluster=1, least=1, combine=False)
GATHERED_CORNERS = [
    ("wgmma", sparse(128, 128, 2048), TWO_ROW_TILES),
    ("wgmma", latent(2, 3, 16, 500, 1, **HALF), ALONE),
    ("dealt", sparse(128, 128, 2048), Config({**TWO_ROW_TILES, "least": 8})),
    ("mma", sparse(128, 8, 2048, **HALF), Config(least=4, combine=False)),
    ("mma", sparse(128, 64, 2048, **PACKED), Config(least=4, combine=True)),
]
"""Corners with pages of one token: their rows are gathered one by one."""
FURTHER_CORNERS = [
    ("wgmma", latent(128, 1, 128, 4096), CLUSTER),
    ("wgmma", latent(16, 2, 16, 512, 16), ALONE),
    ("pair", latent(16, 2, 64, 512, 16), Config(least=1, combine=False)),
    ("pair", latent(128, 1, 64, 4096), Config(least=1, combine=True)),
    ("pair", latent(64, 1, 128, 4096, **PACKED), Config(least=1, combine=True)),
    ("mma", latent(128, 1, 8, 4096, 16, **HALF), Config(least=4, combine=False)),
    ("mma", latent(128, 1, 16, 4096, **PACKED), Config(least=4, combine=False)),
]
"""Other combinations of what the corners above have, compiled by a campaign."""
ALL_CORNERS = [*CORNERS, *GATHERED_CORNERS, *FURTHER_CORNERS]
WIDTHS = {TensorMap: 128, Int32: 4, Float32: 4}
"""Bytes of each kind of parameter, except pointers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "problem", "config"),
    [*CORNERS, *GATHERED_CORNERS, *only_in_campaigns(FURTHER_CORNERS)],
)
def test_a_corner_compiles_without_spills_and_gets_the_parameters_it_declares(
    variant: str, problem: Problem, config: Config
) -> None:
    implementation = catalog.implementation("flashmla", "cuda", variant)
    assert implementation.why_not(config, problem, H200) is None
    program = implementation.program(problem, config, H200)
    for step in program.steps:
        artifact = build(step.source, H200.arch)
        assert artifact.metadata["spill_bytes"] == 0
        assert artifact.metadata["warnings"] == []  # ptxas would warn here of serialized wgmma
        assert step.shared_bytes + artifact.metadata["static_shared_bytes"] <= H200.shared_bytes
        assert step.block * artifact.metadata["registers"] <= 1 << 16
        declared_bytes = [WIDTHS.get(type(param), 8) for param in step.params]
        assert inspect.parameters(artifact.cubin, artifact.kernel) == declared_bytes
        maps = [param for param in step.params if isinstance(param, TensorMap)]
        assert all(tensor_map.why_not(tma_map) is None for tma_map in maps)
    artifact = build(program.steps[0].source, H200.arch)
    gathers = problem["page_size"] == 1
    proven = inspect.prove(implementation, artifact)
    if gathers and variant == "mma":
        assert not proven.pop("tma")
    assert all(proven.values())
    assert gathers == inspect.inspect(artifact).has("LDGSTS")


@pytest.mark.parametrize(
    ("tiles", "max_teams", "teams"),
    [(64, 66, 64), (128, 66, 64), (16, 66, 64), (1, 66, 66), (40, 66, 66), (0, 66, 66)],
)
def test_row_tiles_stay_whole_where_nearly_all_teams_have_work(
    tiles: int, max_teams: int, teams: int
) -> None:
    assert num_teams(latent(tiles, 1, 128, 4096), 128, max_teams) == teams


@pytest.mark.parametrize("sms", [1, 2, 7, 132])
@pytest.mark.parametrize("problem", [p for _, p, _ in ALL_CORNERS], ids=str)
def test_workspaces_hold_two_partial_results_for_each_share(problem: Problem, sms: int) -> None:
    target = replace(H200, sms=sms)
    for implementation in (
        wgmma.IMPLEMENTATION,
        dealt.IMPLEMENTATION,
        pair.IMPLEMENTATION,
        mma.IMPLEMENTATION,
    ):
        for config in implementation.configs(problem, target):
            program = implementation.program(problem, config, target)
            step = program.steps[0]
            side = config.get("row_tiles") or program.workspaces["counters"] // (
                program.workspaces["tasks"] // 4
            )
            shares = step.grid[0] // side
            assert 0 < step.grid[0] <= sms and step.grid[0] == shares * side
            assert program.workspaces["partials"] % (2 * shares * side * 514 * 4) == 0


def test_an_empty_problem_launches_nothing() -> None:
    for problem in (latent(0, 1, 16, 64), appended(0)):
        for implementation in catalog.in_language(problem.entry, "cuda"):
            config = implementation.default(problem, H200)
            assert implementation.program(problem, config, H200).steps == ()


def test_pages_of_one_token_are_not_loaded_by_a_cluster() -> None:
    reason = wgmma.IMPLEMENTATION.why_not(CLUSTER, sparse(128, 128, 2048), H200)
    assert reason == "pages of one token come by cp.async, which cannot multicast to a cluster"


ON_THE_HOST = {
    "sequences of a KV tile or two": (uneven(24, 1, 16, 60), False, 2),
    "teams of two thread blocks": (latent(5, 1, 20, 400, lengths="skewed"), True, 8),
    "eight rows": (latent(3, 3, 2, 300, 16, lengths="ragged", **HALF), False, 5),
    "79 parts of a row": (latent(1, 1, 8, 5000, 128), True, 132),
}  # fmt: skip
"""Problem, whether a second kernel merges, SMs."""


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", ON_THE_HOST)
def test_mma_is_right_on_the_host(case: str, seed: int) -> None:
    """Warps and copies run in an order that follows from the seed."""
    problem, combine, sms = ON_THE_HOST[case]
    host, config = Host(max_blocks=1 << 30, sms=sms, seed=seed), Config(least=4, combine=combine)
    verdict = gate.check(mma.IMPLEMENTATION, problem, config, host, seeds=(seed,))
    assert verdict.passed, verdict.detail
