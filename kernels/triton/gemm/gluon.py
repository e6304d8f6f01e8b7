"""`gemm` in Gluon on Hopper: warps that load, warpgroups that multiply, a ring between them."""

from kernelcat.catalog.implementation import Config, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.arguments import (
    GROUP_M,
    Tile,
    by_descriptor,
    d_cols,
    flags,
    is_empty,
    operands,
    sizes,
)
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.gemm.gluon_device:specialized"
CONSUMERS = 2
CONSUMER_WARPS = 4
MAX_STAGES, MIN_STAGES = 8, 3
ACCUMULATORS = 64 * 256  # that a warpgroup holds without spilling
BARRIER_BYTES = 1024


def part_rows(tile: Tile, config: Config) -> int:
    """Rows of a tile that one consumer multiplies: all of them where consumers take turns."""
    return tile.m if config["schedule"] == "pingpong" else tile.m // CONSUMERS


def d_bytes(problem: Problem, config: Config) -> int:
    """Shared memory through which D leaves; a residual comes as a whole, before any of D."""
    tile = Tile.of(config)
    subtiles = 1 if problem["residual"] else config["subtiles"]
    return 2 * CONSUMERS * part_rows(tile, config) * d_cols(problem, tile.n) // subtiles


def num_stages(problem: Problem, config: Config, gpu: Gpu) -> int:
    """As many as fit."""
    left = gpu.shared_bytes - BARRIER_BYTES - d_bytes(problem, config)
    return int(min(left // Tile.of(config).stage_bytes, MAX_STAGES))


def tail(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Tiles after the last full wave."""
    return Tile.of(config).count(problem) % gpu.sms


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, splits = Tile.of(config), config["tail_splits"]
    split_tiles = tail(problem, config, gpu) if splits > 1 else 0
    units = tile.count(problem) + split_tiles * (splits - 1)
    launch = triton.step(
        KERNEL,
        (min(gpu.sms, units), 1, 1),
        _arguments(problem, config) | sizes(problem, 1),
        {
            **flags(problem),
            **tile.constants,
            "GROUP_M": GROUP_M,
            "NUM_PROGRAMS": gpu.sms,
            "TAIL_SPLITS": splits,
            "NUM_STAGES": num_stages(problem, config, gpu),
            "SUBTILES": config["subtiles"],
            "PINGPONG": config["schedule"] == "pingpong",
        },
        num_warps=CONSUMER_WARPS,
    )
    workspaces = {
        "partials": 4 * split_tiles * splits * tile.m * tile.n,
        "arrivals": 4 * split_tiles * CONSUMERS,
    }
    return Program((launch,), workspaces)


def _arguments(problem: Problem, config: Config) -> dict[str, triton.Argument]:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    tile = Tile.of(config)
    rows, cols = part_rows(tile, config), d_cols(problem, tile.n // config["subtiles"])
    arguments = operands(problem) | {
        "a": triton.descriptor("a", dtype, (m, k), (rows, tile.k), gluon=True),
        "b": triton.descriptor("b", dtype, (n, k), (tile.n, tile.k), gluon=True),
    }
    for name in ("residual", "d") if problem["residual"] else ("d",):
        shape = (m, d_cols(problem, n))
        arguments[name] = triton.descriptor(name, dtype, shape, (rows, cols), gluon=True)
    return arguments | {
        "partials": triton.pointer("partials", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
    }


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, m, k = Tile.of(config), problem["M"], problem["K"]
    rows = part_rows(tile, config)
    if k == 0 or k % 8:
        return f"K={k} must be a positive multiple of 8: TMA rows are 16-byte aligned"
    if not by_descriptor(problem):
        return f"rows of D for N={problem['N']} take no multiple of 16 bytes, as TMA asks for"
    if rows < 64 or rows * tile.n > ACCUMULATORS:
        return f"{rows} x {tile.n} is no tile for one warpgroup"
    if num_stages(problem, config, gpu) < MIN_STAGES:
        return f"fewer than {MIN_STAGES} stages fit in {gpu.shared_bytes} bytes of shared memory"
    if tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    return _reject_splits(config, problem, gpu)


def _reject_splits(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    splits, left = config["tail_splits"], tail(problem, config, gpu)
    if splits == 1:
        return None
    if config["schedule"] == "pingpong":
        return "consumers that take turns expect tiles of one depth: tail_splits must be 1"
    if problem["residual"]:
        return "a residual is loaded for whole tiles: tail_splits must be 1"
    if left == 0 or left * splits > gpu.sms:
        return f"{left} tiles after the last full wave are none to split into {splits}"
    if problem["K"] < 4 * splits * Tile.of(config).k:
        return f"K={problem['K']} is too short for tail_splits={splits}"
    return None


GLUON = implementation(
    variant="gluon",
    summary="specialized warps: one loads, two warpgroups multiply; tail split along K (Gluon)",
    archs=("sm_90a",),
    space={
        "tile": ("128x128x64", "128x256x64", "256x128x64", "64x256x64"),
        "schedule": ("cooperative", "pingpong"),
        "subtiles": (2, 1),
        "tail_splits": (1, 2, 4),
    },
    illegal=_reject,
    program=_program,
    techniques={
        "tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA",
        "warp_specialization": "USETMAXREG",
    },
    rank=3,
    gluon=True,
)  # fmt: skip
