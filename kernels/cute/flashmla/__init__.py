"""`flashmla` in CuTe DSL: a warp for each query, few heads on mma.sync, many on WGMMA.

CTAs that share the tokens of a sequence leave sums in device memory, which a second kernel adds up.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from kernelcat.catalog.cost_model import LAUNCH_US
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.flashmla.program import (
    SIZES,
    attend,
    attend_us,
    compiled_in,
    grid_reject,
    is_empty,
    is_packed,
    parameters,
    row_bytes,
    row_tiles,
    splits_reject,
    tensor_kinds,
    why_not,
)
from kernelcat.kernels.cute.gemm.program import fastest
from kernelcat.reference._mla_row import ROW
from kernelcat.reference.flashmla import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), *["int32"] * len(SIZES), "float32")
    source = CuteSource("flashmla.naive:Naive", kinds, tuple(compiled_in(problem).items()))
    grid = (problem["tokens"], -(-problem["heads"] // NAIVE_WARPS), 1)
    return Program((Step(source, grid, parameters(problem), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="flashmla",
    language="cute",
    variant="naive",
    summary="one warp, one query of one head, token after token; any shape",
    archs=("sm_80+",),
    space={},
    illegal=lambda config, problem, gpu: why_not(problem, gpu),
    default=lambda problem, gpu: Config(),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
)

# split ------------------------------------------------------------------------------------------

SPLIT_ROWS = 16
BYTES_IN_FLIGHT = 72 << 10
"""Of an SM, that keep its share of the memory busy."""
SPLIT_TOKEN_US = 0.014
"""Scores and values of a token for 16 rows, by a CTA of eight warps."""
WIDEN_TOKEN_US = 0.005
"""Making 16 bits of a token's float8, in shared memory."""
BARRIERS_US = 0.2
"""Of a tile."""
SPLITS = (1, 2, 4, 8, 16, 32, 64)


def _cta_bytes(problem: Problem, config: Config) -> int:
    """The ring, a tile that was widened, queries, scores; and 2 KB to spare."""
    block_n = config["block_n"]
    ring = config["stages"] * block_n * row_bytes(problem)
    widened = 2 * ROW * block_n if is_packed(problem) else 0
    return int(ring + widened + SPLIT_ROWS * (2 * ROW + 4 * block_n) + 2048)


def _ctas_per_sm(problem: Problem, config: Config, gpu: Gpu) -> int:
    return int(max(1, min(8 // config["warps"], gpu.shared_bytes // _cta_bytes(problem, config))))


def _split_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not(problem, gpu) or grid_reject(problem):
        return reason
    block_n, stages = config["block_n"], config["stages"]
    if config["warps"] * 8 > block_n:
        return f"tiles of {block_n} tokens leave a warp fewer than 8"
    if _cta_bytes(problem, config) > gpu.shared_bytes:
        return f"{stages} stages do not fit the shared memory"
    slots = gpu.sms * _ctas_per_sm(problem, config, gpu)
    if stages > 3 and block_n == 64:
        return "three such tiles keep the memory busy"
    return splits_reject(problem, SPLIT_ROWS, block_n, config["splits"], slots)


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = {name: config[name] for name in ("block_n", "stages", "warps")}
    constants["ctas_per_sm"] = _ctas_per_sm(problem, config, gpu)
    return attend(
        problem, gpu, "split:Split", constants, block_m=SPLIT_ROWS, splits=config["splits"],
        threads=32 * config["warps"],
    )  # fmt: skip


def _split_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """A warp's products and ldmatrix, which eight warps on an SM hide best; or the bytes."""
    block_n, ctas = config["block_n"], _ctas_per_sm(problem, config, gpu)
    under_way = ctas * (config["stages"] - 1) * block_n * row_bytes(problem)
    flow = min(1.0, (under_way / BYTES_IN_FLIGHT) ** 0.5)
    token_us = (SPLIT_TOKEN_US + is_packed(problem) * WIDEN_TOKEN_US) * 8 / config["warps"]
    tile_us = block_n * token_us + BARRIERS_US
    slots = gpu.sms * ctas
    return attend_us(problem, gpu, SPLIT_ROWS, block_n, config["splits"], slots, tile_us, flow)


SPLIT: Implementation = Implementation(
    entry="flashmla",
    language="cute",
    variant="split",
    summary="16 rows on mma.sync, any page by cp.async, rows of 656 bytes widened in shared memory",
    archs=("sm_80+",),
    space={
        "block_n": (64, 32),
        "warps": (4, 8),
        "stages": (2, 3, 4, 5),
        "splits": SPLITS,
    },
    illegal=_split_reject,
    default=fastest(lambda: SPLIT),
    program=_split_program,
    estimate=_split_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma": "HMMA.16816.F32"},
    rank=2,
)

# wgmma ------------------------------------------------------------------------------------------

WGMMA_BLOCK = 64
WGMMA_TILE_US = 1.7
"""64 rows and 64 tokens, at three quarters of the tensor cores' peak."""
WGMMA_WIDEN_US = 0.3
"""What a tile in float8 takes longer."""
WGMMA_SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 44, 64)


def _wgmma_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := why_not(problem, gpu) or grid_reject(problem):
        return reason
    if is_packed(problem) and config["cluster"] > 1:
        return "packed rows are widened by each CTA, and not multicast"
    if is_packed(problem) and problem["dtype"] != "bfloat16":
        return "what makes float16 of packed rows does not fit the registers"
    if not is_packed(problem) and problem["page_size"] % WGMMA_BLOCK:
        return f"pages of {problem['page_size']} tokens are no whole tiles of {WGMMA_BLOCK}"
    if row_tiles(problem, WGMMA_BLOCK) % config["cluster"]:
        return "an odd number of tiles of rows leaves one alone"
    return splits_reject(problem, WGMMA_BLOCK, WGMMA_BLOCK, config["splits"], gpu.sms)


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = {"block_n": WGMMA_BLOCK} | {n: config[n] for n in ("cluster", "scores_first")}
    return attend(
        problem, gpu, "wgmma:Wgmma", constants, block_m=WGMMA_BLOCK, splits=config["splits"],
        threads=384, cluster=config["cluster"],
    )  # fmt: skip


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Both CTAs of a cluster load a tile once, but wait for each other."""
    tile_us = WGMMA_TILE_US * (0.95 if config["cluster"] > 1 else 1.0)
    tile_us += is_packed(problem) * WGMMA_WIDEN_US
    block, splits = WGMMA_BLOCK, config["splits"]
    return attend_us(problem, gpu, block, block, splits, gpu.sms, tile_us, 1.0)


WGMMA: Implementation = Implementation(
    entry="flashmla",
    language="cute",
    variant="wgmma",
    summary="64 rows, pages by TMA, two warpgroups that halve the values and share the weights",
    archs=("sm_90a",),
    space={"cluster": (1, 2), "scores_first": (False, True), "splits": WGMMA_SPLITS},
    illegal=_wgmma_reject,
    default=fastest(lambda: WGMMA),
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques={
        "tma": "UTMALDG",
        "wgmma": "HGMMA",
        "mbarrier": "SYNCS",
        "register reallocation": "USETMAXREG",
        "stmatrix": "STSM",
        "dependent launch": "ACQBULK",
    },
    rank=3,
)

IMPLEMENTATIONS = (NAIVE, SPLIT, WGMMA)
