"""`gemm` in CuTe DSL: naive, mma.sync, TMA and WGMMA on Hopper, tcgen05 on Blackwell.

The device code is in modules that import the DSL; they are imported when something is compiled.
"""

from __future__ import annotations

from math import ceil

from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Int32, Int64, Pointer, Program, Step
from kernelcat.jit.cute import CuteSource
from kernelcat.model import LAUNCH_US, tiled_gemm_us
from kernelcat.spec import Problem

BLOCK_K = 64
TENSORS = ("a", "b", "bias", "d")


def _source(
    kernel: str, problem: Problem, extra: tuple[str, ...] = (), **constants: int | bool
) -> CuteSource:
    """``extra`` are the parameters after the four tensors."""
    params = ("*" + problem["dtype"],) * len(TENSORS) + extra
    named = {"dtype": problem["dtype"], "bias": problem["bias"], **constants}
    return CuteSource(f"gemm.{kernel}", params, tuple(named.items()))


def _tensors() -> tuple[Pointer, ...]:
    return tuple(Pointer(name) for name in TENSORS)


def _sizes(problem: Problem) -> tuple[Int32, Int32, Int32]:
    return Int32(problem["M"]), Int32(problem["N"]), Int32(problem["K"])


def _empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


# naive ------------------------------------------------------------------------------------------


def _naive_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["M"] > 65535 * 16:
        return "M is beyond the grid's 65535 blocks of 16 rows"
    return None


def _naive_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _empty(problem):
        return Program(())
    source = _source("naive:Naive", problem, ("int32",) * 3)
    grid = (ceil(problem["N"] / 16), ceil(problem["M"] / 16), 1)
    return Program((Step(source, grid, (*_tensors(), *_sizes(problem)), block=256),))


def _naive_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    work = 2 * problem["M"] * problem["N"] * problem["K"]
    return LAUNCH_US + work / (0.012 * gpu.flops["float32"]) * 1e6


# tiled ------------------------------------------------------------------------------------------


def _tiled_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] % 8:
        return f"K={problem['K']} must be a multiple of 8: rows are copied 16 bytes at a time"
    shared = 2 * BLOCK_K * (config["block_m"] + config["block_n"]) * config["stages"]
    if shared > gpu.shared_bytes:
        return f"{shared} bytes of shared memory are more than the {gpu.shared_bytes} of {gpu.sku}"
    return None


def _tiled_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _empty(problem):
        return Program(())
    paired = problem["N"] % 2 == 0
    source = _source("tiled:Tiled", problem, ("int32",) * 3, **config, paired=paired)
    tiles = ceil(problem["M"] / config["block_m"]) * ceil(problem["N"] / config["block_n"])
    params = (*_tensors(), *_sizes(problem))
    return Program((Step(source, (tiles, 1, 1), params, block=2 * config["block_n"]),))


def _tiled_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        blocks_per_sm=max(1, 256 // (config["block_m"] + config["block_n"])),
        efficiency=0.55 if gpu.arch == "sm_90a" else 0.75,
    )


TILED_SPACE = {"block_m": (64, 128), "block_n": (64, 128), "stages": (3,)}


# wgmma ------------------------------------------------------------------------------------------

SWAP_UNTIL = 64
"""Up to so many rows, A takes WGMMA's narrow side and the weights its side of 64 rows."""


def _wgmma_sizes(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles (of a whole cluster) along WGMMA's M and N sides."""
    rows, cols = problem["M"], problem["N"]
    if config["swap"]:
        rows, cols = cols, rows
    height = config["block_m"] * config["cluster"]
    return ceil(rows / height), ceil(cols / config["block_n"])


def _tma_reject(problem: Problem) -> str | None:
    n, k = problem["N"], problem["K"]
    if k == 0 or k % 8 or n % 8:
        return f"TMA needs whole 16-byte units: N={n} and K={k} must be multiples of 8, K > 0"
    return None


def _wgmma_reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    m, k = problem["M"], problem["K"]
    if reason := _tma_reject(problem):
        return reason
    if config["swap"] != (m <= SWAP_UNTIL):
        return f"A and B change sides where M is at most {SWAP_UNTIL}, and only there"
    reason = _narrow_reject(config, m) if config["swap"] else _wide_reject(config, m)
    if reason:
        return reason
    tiles_m, tiles_n = _wgmma_sizes(problem, config)
    ctas = tiles_m * tiles_n * config["cluster"]
    if config["cluster"] > 1 and ctas < gpu.sms:
        return "a cluster's multicast pays when the tiles fill the GPU"
    split_k = config["split_k"]
    if split_k > 1 and (ctas * split_k > 2 * gpu.sms or ceil(k / BLOCK_K) < 4 * split_k):
        return f"split_k={split_k} leaves too much or too little work to a CTA"
    return None


def _narrow_reject(config: Config, m: int) -> str | None:
    if config["cluster"] > 1:
        return "swapped tiles come without clusters"
    if config["block_n"] != max(16, 1 << (max(m, 1) - 1).bit_length()):
        return f"block_n={config['block_n']} is not the smallest that holds {m} rows"
    return None


def _wide_reject(config: Config, m: int) -> str | None:
    if config["cluster"] > 1 and m <= config["block_m"]:
        return "one row of tiles leaves nothing to share in a cluster"
    if config["block_m"] != 128 or config["block_n"] < 64:
        return "tiles that are not swapped have 128 rows and at least 64 columns"
    if config["split_k"] > 4 or (config["split_k"] > 1 and config["block_n"] > 128):
        return "K is split up to 4 times, for tiles of at most 128 columns"
    if config["block_n"] == 64 and m > 128:
        return "64 columns re-read the operands too often for more than 128 rows"
    return None


def _wgmma_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _empty(problem):
        return Program(())
    tiles_m, tiles_n = _wgmma_sizes(problem, config)
    cluster, split_k = config["cluster"], config["split_k"]
    extra = ("*float32", *("int32",) * 5)
    constants = {name: config[name] for name in ("block_m", "block_n", "cluster", "swap")}
    source = _source("wgmma:Wgmma", problem, extra, **constants, split=split_k > 1)
    num_ctas = min(tiles_m * tiles_n * split_k, gpu.sms // cluster) * cluster
    padded = tiles_m * cluster * config["block_m"] * tiles_n * config["block_n"]
    partial = Pointer("partial") if split_k > 1 else Int64(0)
    params = (*_tensors(), partial, *_sizes(problem), Int32(split_k), Int32(num_ctas))
    block = 384 if config["block_m"] == 128 else 160
    step = Step(source, (num_ctas, 1, 1), params, block=block, cluster=(cluster, 1, 1))
    return Program((step,), {"partial": 4 * split_k * padded} if split_k > 1 else {})


def _wgmma_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows, cols = problem["M"], problem["N"]
    if config["swap"]:
        rows, cols = cols, rows
    time = tiled_gemm_us(
        rows,
        cols,
        problem["K"],
        block_m=config["block_m"],
        block_n=config["block_n"],
        split_k=config["split_k"],
        gpu=gpu,
        dtype=problem["dtype"],
    )
    second_kernel = LAUNCH_US if config["split_k"] > 1 else 0.0
    return time * (0.98 if config["cluster"] > 1 else 1.0) + second_kernel


WGMMA_SPACE = {
    "block_m": (128, 64),
    "block_n": (256, 192, 128, 64, 32, 16),
    "cluster": (1, 2),
    "swap": (False, True),
    "split_k": (1, 2, 4, 8),
}


# tcgen05 ----------------------------------------------------------------------------------------


def _tcgen05_program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _empty(problem):
        return Program(())
    source = _source("tcgen05:Tcgen05", problem, ("int32",) * 3, **config)
    tiles = ceil(problem["M"] / 128) * ceil(problem["N"] / config["block_n"])
    params = (*_tensors(), *_sizes(problem))
    return Program((Step(source, (tiles, 1, 1), params, block=192),))


def _tcgen05_estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    return tiled_gemm_us(
        problem["M"],
        problem["N"],
        problem["K"],
        block_m=128,
        block_n=config["block_n"],
        split_k=1,
        gpu=gpu,
        dtype=problem["dtype"],
        efficiency=0.6,
    )


def _fastest(variant: str, problem: Problem, gpu: Gpu) -> Config:
    """The configuration the analytic model ranks first."""
    found = next(i for i in IMPLEMENTATIONS if i.variant == variant)
    configs = list(found.configs(problem, gpu))
    if not configs:  # rejected whatever it is: the caller learns why from `why_not`
        return Config({name: values[0] for name, values in found.space.items()})
    return min(configs, key=lambda config: found.estimate(problem, config, gpu))


IMPLEMENTATIONS = (
    Implementation(
        entry="gemm",
        language="cute",
        variant="naive",
        summary="one thread, one element; any shape",
        archs=("sm_80+",),
        space={},
        reject=_naive_reject,
        default=lambda problem, gpu: Config(),
        program=_naive_program,
        estimate=_naive_estimate,
        rank=0,
    ),
    Implementation(
        entry="gemm",
        language="cute",
        variant="tiled",
        summary="cp.async stages, ldmatrix and mma.sync",
        archs=("sm_80+",),
        space=TILED_SPACE,
        reject=_tiled_reject,
        default=lambda problem, gpu: _fastest("tiled", problem, gpu),
        program=_tiled_program,
        estimate=_tiled_estimate,
        techniques={"cp.async": "LDGSTS", "ldmatrix": "LDSM", "mma.sync": "HMMA"},
        rank=1,
    ),
    Implementation(
        entry="gemm",
        language="cute",
        variant="wgmma",
        summary="persistent and warp-specialized: TMA ring, WGMMA, TMA store, split-K",
        archs=("sm_90a",),
        space=WGMMA_SPACE,
        reject=_wgmma_reject,
        default=lambda problem, gpu: _fastest("wgmma", problem, gpu),
        program=_wgmma_program,
        estimate=_wgmma_estimate,
        techniques={"tma": "UTMALDG", "wgmma": "HGMMA", "mbarrier": "SYNCS"},
        rank=3,
    ),
    Implementation(
        entry="gemm",
        language="cute",
        variant="tcgen05",
        summary="Blackwell: TMA ring, tcgen05, accumulator in tensor memory",
        archs=("sm_100a", "sm_103a"),
        space={"block_n": (256, 128, 64)},
        reject=lambda config, problem, gpu: _tma_reject(problem),
        default=lambda problem, gpu: _fastest("tcgen05", problem, gpu),
        program=_tcgen05_program,
        estimate=_tcgen05_estimate,
        techniques={"tma": "UTMALDG", "tcgen05": "UTCHMMA", "tensor memory": "LDTM"},
        rank=4,
        unverified="needs a Blackwell GPU",
    ),
)
