"""`gemm` in Triton: naive, tiled (asynchronous copies), tma (tensor descriptors), persistent.

The ladder follows Triton's own tutorials (grouped order, persistent descriptors); computing the
transposed product for few rows is CUTLASS's.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from kernelcat import model
from kernelcat.gpu import Gpu
from kernelcat.implementation import Config, Implementation, Program
from kernelcat.jit import triton
from kernelcat.spec import Problem

KERNELS = "kernelcat.kernels.triton.gemm.device:"
GROUP_M = 8
ACCUMULATOR_WARPS = 64 * 256  # accumulators that 4 warps hold without spilling, with room to spare
MIN_BYTES_IN_FLIGHT = 48 << 10
HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a")


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N x BLOCK_K, and what follows from it for one problem."""

    m: int
    n: int
    k: int

    @staticmethod
    def of(config: Config) -> "Tile":
        return Tile(*map(int, config["tile"].split("x")))

    @property
    def warps(self) -> int:
        return 4 if self.m * self.n < ACCUMULATOR_WARPS else 8

    @property
    def stage_bytes(self) -> int:
        return 2 * (self.m + self.n) * self.k

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}

    def count(self, problem: Problem) -> int:
        return ceil(problem["M"] / self.m) * ceil(problem["N"] / self.n)


# ---- programs ----------------------------------------------------------------------------------


def _operands(problem: Problem) -> dict[str, triton.Argument]:
    dtype = problem["dtype"]
    return {name: triton.pointer(name, dtype) for name in ("a", "b", "bias", "d")}


def _described(problem: Problem, tile: Tile, d_cols: int) -> dict[str, triton.Argument]:
    """a and b as descriptors; d too (in tiles of ``d_cols`` columns) unless that is 0."""
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    described = _operands(problem) | {
        "a": triton.descriptor("a", dtype, (m, k), (tile.m, tile.k)),
        "b": triton.descriptor("b", dtype, (n, k), (tile.n, tile.k)),
    }
    store = {"d": triton.descriptor("d", dtype, (m, n), (tile.m, d_cols))} if d_cols else {}
    return described | store


def _sizes(problem: Problem, k_divisor: int | None = None) -> dict[str, triton.Argument]:
    return {
        "M": triton.integer(problem["M"], divisor=1),
        "N": triton.integer(problem["N"]),
        "K": triton.integer(problem["K"], k_divisor),
    }


def _is_empty(problem: Problem) -> bool:
    return problem["M"] == 0 or problem["N"] == 0


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tile = Tile.of(config)
    if _is_empty(problem):
        return Program(())
    grid = (ceil(problem["M"] / tile.m), ceil(problem["N"] / tile.n), 1)
    arguments = _operands(problem) | _sizes(problem)
    constants = {"HAS_BIAS": problem["bias"], **tile.constants}
    return Program(
        (triton.step(KERNELS + "naive", grid, arguments, constants, num_warps=4, num_stages=1),)
    )


def _split(kernel: str, problem: Problem, config: Config, arguments: dict, **more: bool) -> Program:
    """One launch over (tiles, split_k); a workspace for partial tiles where K is split."""
    tile, split = Tile.of(config), config["split_k"]
    tiles = tile.count(problem)
    depth = ceil(problem["K"] / split / tile.k) * tile.k
    arguments = {
        **arguments,
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        **_sizes(problem, None if kernel == "tiled" else 1),
        "split_depth": triton.integer(depth),
    }
    constants = {"HAS_BIAS": problem["bias"], **tile.constants, "GROUP_M": GROUP_M}
    launch = triton.step(
        KERNELS + kernel,
        (tiles, split, 1),
        arguments,
        constants | {"SPLIT_K": split} | more,
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    partials = tiles * split * tile.m * tile.n if split > 1 else 0
    return Program((launch,), {"partials": 4 * partials, "arrivals": 4 * tiles})


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    return _split("tiled", problem, config, _operands(problem))


def _tma(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    by_descriptor = config["split_k"] == 1 and problem["N"] % 8 == 0
    arguments = _described(problem, tile, tile.n if by_descriptor else 0)
    swap = tile.m < 64
    return _split("tma", problem, config, arguments, SWAP=swap, TMA_STORE=by_descriptor)


def _persistent(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    tile = Tile.of(config)
    by_descriptor = problem["N"] % 8 == 0
    d_cols = tile.n // config["subtiles"] if by_descriptor else 0
    launch = triton.step(
        KERNELS + "persistent",
        (min(gpu.sms, tile.count(problem)), 1, 1),
        _described(problem, tile, d_cols) | _sizes(problem, 1),
        {
            "HAS_BIAS": problem["bias"],
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": gpu.sms,
            "SUBTILES": config["subtiles"],
            "TMA_STORE": by_descriptor,
            "WARP_SPECIALIZE": gpu.arch in BLACKWELL,
        },
        num_warps=tile.warps,
        num_stages=config["stages"],
    )
    return Program((launch,))


# ---- which configurations serve ----------------------------------------------------------------


def _reject_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["N"] > 65535 * Tile.of(config).n:
        return "N needs more than 65535 tiles, the most a grid's second axis has"
    return None


def _reject_tile(
    tile: Tile, stages: int, problem: Problem, gpu: Gpu, epilogue: int = 0, least_m: int = 16
) -> str | None:
    """What holds for every pipelined variant; ``epilogue``: bytes of shared memory it takes."""
    shared = tile.stage_bytes * stages + epilogue + 1024  # barriers, and what Triton aligns
    if shared > gpu.shared_bytes:
        return f"{stages} stages take {shared} bytes of shared memory, {gpu.sku} has less"
    m = problem["M"]
    if tile.m > least_m and tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    if m > (128 if tile.m == 64 else tile.m) and tile.m <= 64:
        return f"tiles of {tile.m} rows read B more often than M={m} needs"
    return None


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, split = Tile.of(config), config["stages"], config["split_k"]
    if split > 1 and tile.count(problem) * split > 2 * gpu.sms:
        return f"{tile.count(problem)} tiles fill {gpu.sms} SMs without split_k={split}"
    if split > 1 and problem["K"] < 4 * tile.k * split:
        return f"K={problem['K']} is too short for split_k={split}"
    return _reject_tile(tile, stages, problem, gpu)


def _reject_depth(tile: Tile, stages: int, problem: Problem) -> str | None:
    """What descriptors ask for."""
    if problem["K"] == 0 or problem["K"] % 8:
        return f"K={problem['K']} must be a positive multiple of 8: TMA rows are 16-byte aligned"
    if tile.stage_bytes * stages < MIN_BYTES_IN_FLIGHT:
        return f"{stages} stages are too few to cover the latency of memory"
    return None


def _reject_tma(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    reason = _reject_depth(Tile.of(config), config["stages"], problem)
    return reason or _reject_tiled(config, problem, gpu)


def _reject_persistent(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, stages, subtiles = Tile.of(config), config["stages"], config["subtiles"]
    if problem["N"] % 8 and (subtiles > 1 or tile.n > 128):
        return f"N={problem['N']} is no multiple of 8: stored by pointers, which spill if many"
    epilogue = 2 * tile.m * tile.n // subtiles
    reason = _reject_depth(tile, stages, problem)
    return reason or _reject_tile(tile, stages, problem, gpu, epilogue, least_m=64)


# ---- which one without measuring ---------------------------------------------------------------


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The model's time, longer where programs are too few, or too large to overlap.

    A program alone on its SM leaves memory idle while it starts and while it ends.
    """
    tile, split, stages = Tile.of(config), config.get("split_k", 1), config.get("stages", 0)
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    efficiency = 0.1  # nothing overlaps in a kernel without stages
    if stages:
        efficiency = 0.75 if tile.m * tile.n >= 128 * 256 else 0.65
    us = model.tiled_gemm_us(
        m, n, k, block_m=tile.m, block_n=tile.n, split_k=split, gpu=gpu, dtype=dtype,
        efficiency=efficiency,
    )  # fmt: skip
    programs = max(tile.count(problem) * split, 1)
    idle = gpu.sms / min(programs, gpu.sms)
    alone = 2 * tile.stage_bytes * stages > gpu.shared_bytes and "subtiles" not in config
    gaps = model.WAVE_LATENCY_US * (ceil(programs / gpu.sms) - 1) if alone else 0
    memory_us = model.copy_us(2 * (m * k + n * k + m * n), gpu) * idle + gaps
    return max(us, memory_us) if stages else us + memory_us


def _implementation(**fields: Any) -> Implementation:
    """An implementation whose default is the best by the model, with the deepest pipeline."""

    def default(problem: Problem, gpu: Gpu) -> Config:
        def cost(config: Config) -> tuple[float, int]:
            return _estimate(problem, config, gpu), -config.get("stages", 0)

        first = Config({name: values[0] for name, values in made.space.items()})
        return min(made.configs(problem, gpu), key=cost, default=first)

    made = Implementation(
        entry="gemm", language="triton", default=default, estimate=_estimate, **fields
    )
    return made


NAIVE = _implementation(
    variant="naive",
    summary="one small tile a program, masked loads",
    archs=("sm_80+",),
    space={"tile": ("32x32x32", "32x64x32", "64x64x32")},
    reject=_reject_naive,
    program=_naive,
    rank=0,
)

TILED = _implementation(
    variant="tiled",
    summary="grouped order, software-pipelined asynchronous copies, split-K; any shape",
    archs=("sm_80+",),
    space={
        "tile": (
            "16x64x128", "32x64x128", "64x64x64", "64x128x64",
            "128x128x32", "128x128x64", "128x256x64",
        ),
        "stages": (3, 4),
        "split_k": (1, 2, 4, 8),
    },
    reject=_reject_tiled,
    program=_tiled,
    techniques={"cp_async": "LDGSTS"},
    rank=1,
)  # fmt: skip

TMA = _implementation(
    variant="tma",
    summary="tensor descriptors, warpgroup products, few rows transposed, split-K",
    archs=HOPPER,
    space={
        "tile": (
            "16x64x128", "16x128x128", "32x64x128", "32x128x128", "64x64x128", "64x128x64",
            "128x128x64", "128x256x64", "256x128x64",
        ),
        "stages": (3, 4, 6),
        "split_k": (1, 2, 4, 8),
    },
    reject=_reject_tma,
    program=_tma,
    techniques={"tma": "UTMALDG", "wgmma": "HGMMA"},
    rank=3,
)  # fmt: skip

PERSISTENT = _implementation(
    variant="persistent",
    summary="a program an SM over many tiles, stores overlapped with the next tile's loads",
    archs=HOPPER,
    space={
        "tile": ("64x128x64", "128x128x64", "128x256x64", "256x128x64"),
        "stages": (3, 4, 6),
        "subtiles": (1, 2),
    },
    reject=_reject_persistent,
    program=_persistent,
    techniques={"tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA"},
    rank=2,  # below tma, which splits K where tiles are few
)


def _on_blackwell(hopper: Implementation) -> Implementation:
    """The same source for Blackwell, where Triton makes tcgen05 products of it."""
    same = ("summary", "space", "reject", "program", "rank")
    techniques = {name: sass for name, sass in hopper.techniques.items() if name != "wgmma"}
    return _implementation(
        variant=f"{hopper.variant}_blackwell",
        archs=BLACKWELL,
        techniques=techniques | {"tcgen05": "UTCHMMA"},
        unverified="needs a Blackwell GPU",
        **{name: getattr(hopper, name) for name in same},
    )


IMPLEMENTATIONS = (NAIVE, TILED, TMA, PERSISTENT, _on_blackwell(TMA), _on_blackwell(PERSISTENT))
