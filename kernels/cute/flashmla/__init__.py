"""`flashmla` in CuTe DSL: a warp for each query, few heads on mma.sync, many on WGMMA.

Thread blocks that split the tokens of a sequence store partial results in device memory, which a
second kernel merges.

The device code is in modules that import the DSL; they are imported when a kernel is compiled.
"""

from __future__ import annotations

from kernelcat.catalog.cost_model import BANDWIDTH_EFFICIENCY, LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit.cute import CuteSource
from kernelcat.kernels.cute.flashmla.program import (
    SIZES,
    attend,
    attend_us,
    illegal_problem,
    illegal_size,
    is_empty,
    is_packed,
    kernel_constants,
    num_row_tiles,
    parameters,
    row_bytes,
    tensor_kinds,
    unpromising_splits,
)
from kernelcat.reference._mla_row import LATENT, ROW
from kernelcat.reference.flashmla import ENTRY
from kernelcat.runtime.gpu import Gpu

NAIVE_WARPS = 4


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    kinds = (*tensor_kinds(problem), *["int32"] * len(SIZES), "float32")
    source = CuteSource("flashmla.naive:Naive", kinds, tuple(kernel_constants(problem).items()))
    grid = (problem["tokens"], -(-problem["heads"] // NAIVE_WARPS), 1)
    return Program((Step(source, grid, parameters(problem), block=32 * NAIVE_WARPS),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return LAUNCH_US + ENTRY.flops(problem) / (0.02 * gpu.flops["float32"]) * 1e6


NAIVE = Implementation(
    entry="flashmla",
    language="cute",
    variant="naive",
    summary="one warp for one query of one head, one token after another; any shape",
    archs=("sm_80+",),
    space={},
    illegal=lambda config, problem, gpu: illegal_problem(problem, gpu),
    program=_naive_program,
    estimate=_naive_estimate,
    techniques={"warp shuffle": "SHFL.BFLY"},
    rank=0,
)

# split ------------------------------------------------------------------------------------------

SPLIT_ROWS = 16
BYTES_IN_FLIGHT = 72 << 10
"""Bytes that an SM must have in flight to get its part of the memory bandwidth."""
SPLIT_TOKEN_US = 0.0272
"""An SM's time for scores and values of a token for 16 rows, by four or eight warps."""
WIDEN_TOKEN_US = 0.021
"""An SM's time to widen a token's float8 elements to 16 bits, in shared memory."""
MIN_TILE_US = 1.05
"""Waits of a thread block at barriers and for copies, for a tile."""
SPLITS = (1, 2, 4, 8, 16, 32, 64)


def _cta_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a thread block: ring, a widened tile, queries, scores, 2 KB to spare."""
    block_n = config["block_n"]
    ring = config["stages"] * block_n * row_bytes(problem)
    widened = 2 * ROW * block_n if is_packed(problem) else 0
    return int(ring + widened + SPLIT_ROWS * (2 * ROW + 4 * block_n) + 2048)


def _ctas_per_sm(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Thread blocks on an SM: eight warps, if shared memory allows."""
    return int(max(1, min(8 // config["warps"], gpu.shared_bytes // _cta_bytes(problem, config))))


def _illegal_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := illegal_size(problem, gpu):
        return reason
    if config["warps"] * 8 > config["block_n"]:
        return f"block_n={config['block_n']} leaves a warp fewer than the 8 tokens of mma.sync"
    if (shared_bytes := _cta_bytes(problem, config)) > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory; {gpu.sku} has {gpu.shared_bytes}"
    return None


def _unpromising_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n, splits = config["block_n"], config["splits"]
    resident_ctas = gpu.sms * _ctas_per_sm(problem, config, gpu)
    if config["stages"] > 3 and block_n == 64:
        return "three stages of 64 tokens have enough bytes in flight"
    return unpromising_splits(problem, SPLIT_ROWS, block_n, splits, resident_ctas)


def _split_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    constants = {name: config[name] for name in ("block_n", "stages", "warps")}
    constants["ctas_per_sm"] = _ctas_per_sm(problem, config, gpu)
    return attend(
        problem, gpu, "split:Split", constants, block_m=SPLIT_ROWS, splits=config["splits"],
        threads=32 * config["warps"],
    )  # fmt: skip


def _split_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Time of the tiles' waits, or of their ldmatrix and products, or of the bytes."""
    block_n, ctas = config["block_n"], _ctas_per_sm(problem, config, gpu)
    bytes_in_flight = ctas * (config["stages"] - 1) * block_n * row_bytes(problem)
    bandwidth_share = min(1.0, (bytes_in_flight / BYTES_IN_FLIGHT) ** 0.5)
    token_us = SPLIT_TOKEN_US + is_packed(problem) * WIDEN_TOKEN_US
    tile_us = max(MIN_TILE_US, ctas * block_n * token_us)
    return attend_us(
        problem, gpu, SPLIT_ROWS, block_n, config["splits"], gpu.sms * ctas, tile_us,
        bandwidth_share,
    )  # fmt: skip


SPLIT = Implementation(
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
    illegal=_illegal_split,
    unpromising=_unpromising_split,
    program=_split_program,
    estimate=_split_estimate,
    techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma": "HMMA.16816.F32"},
    rank=2,
)

# wgmma ------------------------------------------------------------------------------------------

WGMMA_BLOCK = 64
WGMMA_TILE_US = 1.95
"""A tile of 64 rows and 64 tokens, at three fifths of the tensor cores' peak."""
SHORT_TILES, SHORT_SCORES_FIRST, SCORES_FIRST = 16, 0.93, 1.03
"""``scores_first`` takes 0.90 to 0.98 of the time where each thread block has all tiles of tokens
and these are few, and 0.99 to 1.10 elsewhere (51 pairs of times on an H200)."""
SMALLEST_PAGE = 16
"""Tokens that TMA must load at once. Pages smaller than a tile cost 3 % at most."""
WGMMA_WIDEN_US = 1.07
"""What a tile of packed rows takes longer."""
WGMMA_SPLITS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 44, 64)
PARAMETERS = {"cluster": (1, 2), "scores_first": (False, True)}
TECHNIQUES = {
    "tma": "UTMALDG",
    "wgmma": "HGMMA",
    "mbarrier": "SYNCS",
    "register reallocation": "USETMAXREG",
    "stmatrix": "STSM",
    "dependent launch": "ACQBULK",
}


def _illegal_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if reason := illegal_size(problem, gpu):
        return reason
    if is_packed(problem) and config["cluster"] > 1:
        return "packed rows are widened by each thread block, not multicast: cluster must be 1"
    if is_packed(problem) and problem["dtype"] != "bfloat16":
        return "packed rows are widened to bfloat16 only: float16 does not fit the registers"
    page_size = problem["page_size"]
    if not is_packed(problem) and page_size < SMALLEST_PAGE:
        return f"page_size={page_size}: TMA loads {SMALLEST_PAGE} tokens or more at once"
    if not is_packed(problem) and page_size < WGMMA_BLOCK and config["cluster"] > 1:
        return f"a page of {page_size} tokens is not divided among a cluster"
    row_tiles = num_row_tiles(problem, WGMMA_BLOCK)
    if row_tiles % config["cluster"]:
        return f"clusters of two thread blocks take an even number of row tiles, not {row_tiles}"
    return None


def _unpromising_wgmma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    return unpromising_splits(problem, WGMMA_BLOCK, WGMMA_BLOCK, config["splits"], gpu.sms)


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _by_wgmma(problem, config, gpu, config["splits"])


def _by_wgmma(
    problem: Problem, config: Config, gpu: Gpu, splits: int, **more: bool
) -> Program:
    constants = {"block_n": WGMMA_BLOCK} | {n: config[n] for n in PARAMETERS} | more
    return attend(
        problem, gpu, "wgmma:Wgmma", constants, block_m=WGMMA_BLOCK, splits=splits,
        threads=384, cluster=config["cluster"],
    )  # fmt: skip


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _wgmma_us(problem, config, gpu, config["splits"])


def _wgmma_us(
    problem: Problem, config: Config, gpu: Gpu, splits: int, is_causal: bool = False
) -> float:
    """Thread blocks of a cluster load a tile once for both, but wait for each other.

    An SM has one thread block, so no product runs there while queries are loaded or results are
    stored.
    """
    paired = 1.03 if is_causal else 0.95
    tile_us = WGMMA_TILE_US * (paired if config["cluster"] > 1 else 1.0)
    tile_us += is_packed(problem) * WGMMA_WIDEN_US
    if config["scores_first"]:
        tiles = problem["table_width"] * problem["page_size"] / WGMMA_BLOCK
        is_short = splits == 1 and tiles <= SHORT_TILES
        tile_us *= SHORT_SCORES_FIRST if is_short else SCORES_FIRST
    us = attend_us(
        problem, gpu, WGMMA_BLOCK, WGMMA_BLOCK, splits, gpu.sms, tile_us, 1.0, config["cluster"],
        is_causal,
    )  # fmt: skip
    num_bytes = problem["tokens"] * problem["heads"] * 2 * (ROW + LATENT)
    return us + copy_us(num_bytes, gpu, BANDWIDTH_EFFICIENCY)


WGMMA = Implementation(
    entry="flashmla",
    language="cute",
    variant="wgmma",
    summary="64 rows, pages by TMA, two warpgroups with half of the values each, sharing weights",
    archs=("sm_90a",),
    space=PARAMETERS | {"splits": WGMMA_SPLITS},
    illegal=_illegal_wgmma,
    unpromising=_unpromising_wgmma,
    program=_wgmma_program,
    estimate=_wgmma_estimate,
    techniques=TECHNIQUES,
    rank=3,
)


# causal -----------------------------------------------------------------------------------------


def _illegal_causal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["max_q"] <= 1:
        return "of sequences with one query each, every row sees all tokens"
    return _illegal_wgmma(config, problem, gpu)


CAUSAL = Implementation(
    entry="flashmla",
    language="cute",
    variant="causal",
    summary="wgmma's kernel for prompts: row tiles end at the last token they see, longest first",
    archs=("sm_90a",),
    space=PARAMETERS,
    illegal=_illegal_causal,
    program=lambda problem, config, gpu: _by_wgmma(problem, config, gpu, 1, is_causal=True),
    estimate=lambda problem, config, gpu: _wgmma_us(problem, config, gpu, 1, is_causal=True),
    techniques=TECHNIQUES,
    rank=3,
)

IMPLEMENTATIONS = (NAIVE, SPLIT, WGMMA, CAUSAL)
