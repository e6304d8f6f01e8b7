"""`out_router` in Triton: naive (a kernel for each formula), tiled (two kernels, tensor cores)."""

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import split_k, streamed
from kernelcat.kernels.triton.common.dependent_launch import dependent_step
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.kernels.triton.common.product import illegal_stages
from kernelcat.kernels.triton.out_router.tiles import BLOCK_E, MAX_ROUTE_BLOCK_T, Tiles
from kernelcat.reference.out_router import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNELS = "kernelcat.kernels.triton.out_router.device:"
TENSORS = {tensor.name: tensor for tensor in ENTRY.tensors}
NAIVE_ROWS, NAIVE_BLOCK_K = 32, 128
"""Rows and columns of weights that a program multiplies at a time."""

MAX_PARTS = 64
"""Parts of the columns of x whose partial sums a program loads at once."""
MAX_SQUARES = 256
"""Sums of squares of a token that a program loads at once."""

SPACE = {
    "tile": ("32x128", "32x256", "64x64", "64x128", "128x64"),
    "split_k": (1, 2, 3, 4, 6),
    "stages": (4, 6),
    "depth": (128, 256),
}
"""
tile : rows and columns of wo that are loaded at a time
split_k : parts of the columns of attn
depth : columns of x of a program of the second kernel
"""

ROUTE_US = 1.5
"""Time of a program of the second kernel."""


def _pointers(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    return {name: triton.pointer(name, TENSORS[name].dtype_of(problem)) for name in names}


def _sizes(problem: Problem, *names: str) -> dict[str, triton.Argument]:
    return {name: triton.integer(problem[name]) for name in names}


# ---- naive ---------------------------------------------------------------------------------------


def _naive_step(
    kernel: str,
    problem: Problem,
    num_rows: int,
    arguments: dict[str, triton.Argument],
    **constants: ConfigValue,
) -> Step:
    """A launch with programs for each token and for each NAIVE_ROWS of ``num_rows`` rows."""
    grid = (problem["tokens"], ceil(num_rows / NAIVE_ROWS), 1)
    constants = {**constants, "BLOCK_K": NAIVE_BLOCK_K}
    return triton.step(KERNELS + kernel, grid, arguments, constants, num_warps=4)


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    project = _naive_step(
        "project", problem, problem["hidden"],
        _pointers(problem, "attn", "wo", "bo", "residual") | _sizes(problem, "width", "hidden"),
        BIAS=problem["bias"], BLOCK_N=NAIVE_ROWS,
    )  # fmt: skip
    normalize = _naive_step(
        "normalize", problem, 1,
        _pointers(problem, "residual", "norm_weight", "x")
        | _sizes(problem, "hidden")
        | {"eps": triton.real(problem["eps"])},
    )  # fmt: skip
    route = _naive_step(
        "route", problem, problem["experts"],
        _pointers(problem, "x", "router", "router_bias", "logits")
        | _sizes(problem, "hidden", "experts"),
        BIAS=problem["router_bias"], BLOCK_E=NAIVE_ROWS,
    )  # fmt: skip
    steps = (project, normalize) if problem["hidden"] else ()
    return Program((*steps, route) if problem["experts"] else steps)


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    for axis in ("hidden", "experts"):
        if problem[axis] > MAX_GRID_Y * NAIVE_ROWS:
            return (
                f"{axis}={problem[axis]} takes more than {MAX_GRID_Y} programs of {NAIVE_ROWS} "
                "rows, the most on a second axis"
            )
    return None


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Every token reads all weights again, mostly from L2."""
    return 3 * LAUNCH_US + 2 * copy_us(max(problem["tokens"], 1) * ENTRY.bytes_moved(problem), gpu)


# ---- tiled ---------------------------------------------------------------------------------------


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    tokens, hidden = problem["tokens"], problem["hidden"]
    if not tokens * max(hidden, problem["experts"]):
        return Program(())
    route = _route_step(problem, config, gpu)
    steps = (_project_step(problem, config, gpu), route) if hidden else (route,)
    return Program(steps, _workspaces(problem, config))


def _project_step(problem: Problem, config: Config, gpu: Gpu) -> Step:
    tiles, splits = Tiles.of(problem, config), config["split_k"]
    depth = ceil(problem["width"] / splits / tiles.block_k) * tiles.block_k
    return dependent_step(
        gpu,
        KERNELS + "project_tile",
        (tiles.columns, splits, tiles.groups),
        _pointers(problem, "attn", "wo", "bo", "residual")
        | {"squares": triton.pointer("squares", "float32")}
        | split_k.arguments()
        | {"tokens": triton.integer(problem["tokens"], divisor=1)}
        | _sizes(problem, "width", "hidden")
        | {"split_depth": triton.integer(depth)},
        {
            "BIAS": problem["bias"],
            "SPLIT_K": splits,
            "PARTS": next_power_of_two(splits),
            "BLOCK_N": tiles.block_n,
            "BLOCK_T": tiles.block_t,
            "BLOCK_K": tiles.block_k,
        },
        num_warps=tiles.warps,
        num_stages=config["stages"],
    )


def _route_step(problem: Problem, config: Config, gpu: Gpu) -> Step:
    tiles = Tiles.of(problem, config)
    return dependent_step(
        gpu,
        KERNELS + "route_tile",
        (tiles.parts, tiles.experts, tiles.route_groups),
        _pointers(problem, "residual", "norm_weight", "router", "router_bias")
        | {"squares": triton.pointer("squares", "float32")}
        | _pointers(problem, "x", "logits")
        | split_k.arguments()
        | {"tokens": triton.integer(problem["tokens"], divisor=1)}
        | _sizes(problem, "hidden", "experts")
        | {"num_squares": triton.integer(tiles.columns, divisor=1)}
        | {"eps": triton.real(problem["eps"])},
        {
            "HAS_ROUTER": problem["experts"] > 0,
            "BIAS": problem["router_bias"],
            "SPLIT_K": tiles.parts,
            "PARTS": next_power_of_two(tiles.parts),
            "BLOCK_E": BLOCK_E,
            "BLOCK_T": tiles.route_block_t,
            "BLOCK_K": config["depth"],
            "BLOCK_S": max(min(next_power_of_two(tiles.columns), MAX_SQUARES), 1),
        },
        num_warps=tiles.route_warps,
    )


def _workspaces(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes of each workspace; both kernels use partials and arrivals, one after the other."""
    tiles, splits = Tiles.of(problem, config), config["split_k"]
    project_tiles, route_tiles = tiles.columns * tiles.groups, tiles.experts * tiles.route_groups
    project = project_tiles * splits * tiles.block_n * tiles.block_t if splits > 1 else 0
    route = route_tiles * tiles.parts * BLOCK_E * tiles.route_block_t if problem["experts"] else 0
    return {
        "partials": 4 * max(project, route),
        "arrivals": 4 * max(project_tiles, route_tiles),
        "squares": 4 * tiles.columns * problem["tokens"],
    }


def _way_out(config: Config) -> str:
    """What serves rows with too many parts."""
    deepest = max(SPACE["depth"])
    return f"depth={deepest}" if config["depth"] < deepest else "naive"


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tiles, stages = Tiles.of(problem, config), config["stages"]
    if tiles.experts > MAX_GRID_Y:
        return f"experts={problem['experts']} are more than {MAX_GRID_Y * BLOCK_E} of a grid"
    if tiles.route_groups > MAX_GRID_Y:
        return (
            f"tokens={problem['tokens']} are more than {MAX_GRID_Y * MAX_ROUTE_BLOCK_T} of a grid"
        )
    if problem["experts"] and tiles.parts > MAX_PARTS:
        return (
            f"hidden={problem['hidden']} has more than {MAX_PARTS} parts of "
            f"depth={config['depth']}: use {_way_out(config)}"
        )
    num_bytes = tiles.stage_bytes * stages + streamed.RESERVED_BYTES
    return illegal_stages(stages, num_bytes, gpu)


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    tiles = Tiles.of(problem, config)
    return streamed.unpromising_splits(
        config["split_k"], tiles.columns * tiles.groups, problem["width"], tiles.block_k,
        tiles.block_n * tiles.block_t, tiles.warps, gpu,
    )  # fmt: skip


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The time to stream wo; then partial sums of h and of logits, and the second kernel."""
    tiles, splits = Tiles.of(problem, config), config["split_k"]
    num_programs = max(tiles.columns * splits * tiles.groups, 1)
    stream_us = streamed.stream_us(
        ENTRY.bytes_moved(problem), num_programs, tiles.stage_bytes, config["stages"],
        tiles.warps, gpu,
    )  # fmt: skip
    has_parts = tiles.parts > 1 and problem["experts"] > 0
    sums_us = streamed.LAST_SPLIT_US * ((splits > 1) + has_parts)
    num_routes = tiles.parts * tiles.experts * tiles.route_groups
    return stream_us + sums_us + LAUNCH_US + ROUTE_US * ceil(num_routes / (4 * gpu.sms))


# ---- the ladder ----------------------------------------------------------------------------------


NAIVE = Implementation(
    entry="out_router",
    language="triton",
    variant="naive",
    summary="a kernel for each formula, a token's elements a program; any shape",
    archs=("sm_80+",),
    space={},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

TILED = Implementation(
    entry="out_router",
    language="triton",
    variant="tiled",
    summary="two kernels: wo streamed by split-K with sums of squares; x and the router's product",
    archs=("sm_80+",),
    space=SPACE,
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate_tiled,
    techniques={"asynchronous copies": "LDGSTS"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
