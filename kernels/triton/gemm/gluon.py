"""`gemm` in Gluon on Hopper: one warp loads, two warpgroups multiply, a ring between them."""

from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import ring, split_k
from kernelcat.kernels.triton.common.architectures import HOPPER
from kernelcat.kernels.triton.common.estimate import estimate
from kernelcat.kernels.triton.common.product import (
    GROUP_M,
    WARPGROUP_ACCUMULATORS,
    Tile,
    is_empty,
    sizes,
)
from kernelcat.kernels.triton.gemm.arguments import (
    can_store_by_tma,
    d_cols,
    flags,
    illegal_depth,
    pointers,
)
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.gemm.gluon_device:specialized"


def _part_rows(tile: Tile, config: Config) -> int:
    """Rows of a tile that one consumer multiplies: all of them where consumers take turns."""
    return tile.m if config["schedule"] == "pingpong" else tile.m // ring.CONSUMERS


def num_stages(problem: Problem, config: Config, gpu: Gpu) -> int:
    """As many stages as fit beside D's tiles; a residual is loaded for a whole tile at once."""
    tile = Tile.of(config)
    subtiles = 1 if problem["residual"] else config["subtiles"]
    cols = d_cols(problem, tile.n) // subtiles
    d_bytes = 2 * ring.CONSUMERS * _part_rows(tile, config) * cols
    return ring.num_stages(tile.stage_bytes, d_bytes, gpu)


def _tail_tiles(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Tiles after the last full wave."""
    return Tile.of(config).count(problem) % gpu.sms


def _program(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if is_empty(problem):
        return Program(())
    tile, splits = Tile.of(config), config["tail_splits"]
    split_tiles = _tail_tiles(problem, config, gpu) if splits > 1 else 0
    num_items = tile.count(problem) + split_tiles * (splits - 1)
    launch = triton.step(
        KERNEL,
        (min(gpu.sms, num_items), 1, 1),
        _arrays(problem, config) | split_k.arguments() | sizes(problem, 1),
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
        num_warps=ring.CONSUMER_WARPS,
    )
    workspaces = {
        "partials": 4 * split_tiles * splits * tile.m * tile.n,
        "arrivals": 4 * split_tiles * ring.CONSUMERS,
    }
    return Program((launch,), workspaces)


def _arrays(problem: Problem, config: Config) -> dict[str, triton.Argument]:
    m, n, k, dtype = (problem[axis] for axis in ("M", "N", "K", "dtype"))
    tile = Tile.of(config)
    rows, cols = _part_rows(tile, config), d_cols(problem, tile.n // config["subtiles"])
    arrays = pointers(problem) | {
        "a": triton.descriptor("a", dtype, (m, k), (rows, tile.k), gluon=True),
        "b": triton.descriptor("b", dtype, (n, k), (tile.n, tile.k), gluon=True),
    }
    for name in ("residual", "d") if problem["residual"] else ("d",):
        shape = (m, d_cols(problem, n))
        arrays[name] = triton.descriptor(name, dtype, shape, (rows, cols), gluon=True)
    return arrays


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile = Tile.of(config)
    rows = _part_rows(tile, config)
    if reason := illegal_depth(problem):
        return reason
    if not can_store_by_tma(problem):
        return f"rows of D for N={problem['N']} take no multiple of 16 bytes, as TMA needs"
    if rows < 64 or rows * tile.n > WARPGROUP_ACCUMULATORS:
        return (
            f"{rows} x {tile.n} accumulators of a warpgroup: it multiplies at least 64 rows, "
            f"and its registers hold {WARPGROUP_ACCUMULATORS} accumulators"
        )
    return ring.illegal_stages(num_stages(problem, config, gpu), gpu) or _illegal_splits(
        config, problem
    )


def _illegal_splits(config: Config, problem: Problem) -> str | None:
    splits, tile = config["tail_splits"], Tile.of(config)
    if splits == 1:
        return None
    if config["schedule"] == "pingpong":
        return "consumers that take turns need tiles of one depth: tail_splits must be 1"
    if problem["residual"]:
        return "a residual is loaded for whole tiles: tail_splits must be 1"
    if problem["K"] < splits * tile.k:
        return f"K={problem['K']} has no k-block of {tile.k} for each of tail_splits={splits}"
    return None


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tile, splits, m = Tile.of(config), config["tail_splits"], problem["M"]
    if tile.m >= 2 * m:
        return f"tiles of {tile.m} rows are at least half empty for M={m}"
    tail_tiles = _tail_tiles(problem, config, gpu)
    if splits > 1 and tail_tiles == 0:
        return f"no tiles after the last full wave: tail_splits={splits} has nothing to split"
    if splits > 1 and tail_tiles * splits > gpu.sms:
        return f"{tail_tiles} tiles after the last full wave split into {splits} make another wave"
    if splits > 1 and problem["K"] < 4 * splits * tile.k:
        return f"K={problem['K']} is too short for tail_splits={splits}"
    return None


GLUON = Implementation(
    entry="gemm",
    language="triton",
    variant="gluon",
    summary="specialized warps: one loads, two warpgroups multiply; tail split along K (Gluon)",
    archs=HOPPER,
    space={
        "tile": ("128x128x64", "128x256x64", "256x128x64", "64x256x64"),
        "schedule": ("cooperative", "pingpong"),
        "subtiles": (2, 1),
        "tail_splits": (1, 2, 4),
    },
    illegal=_illegal,
    unpromising=_unpromising,
    program=_program,
    estimate=estimate,
    techniques={
        "tma": "UTMALDG", "tma_store": "UTMASTG", "wgmma": "HGMMA",
        "warp_specialization": "USETMAXREG",
    },
    rank=3,
    gluon=True,
)  # fmt: skip
