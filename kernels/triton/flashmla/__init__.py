"""`flashmla` in Triton: naive, tiled (a tile of rows a program), split (equal ranges of all tiles).

Programs gather the rows of cached tokens by pointers through the block table, so that any page size
serves.
"""

from functools import partial
from math import ceil, e, log2

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common import mla_row
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference._sequences import query_groups
from kernelcat.reference.flashmla import ENTRY, row_length
from kernelcat.runtime.gpu import Gpu

PACKAGE = "kernelcat.kernels.triton.flashmla"
MAX_ROW_TILES = 4096
"""Row tiles at most whose counts a program of `split` holds in registers."""
COMBINE_PROGRAMS = 8
"""Programs of `combine` on an SM, unless there are more row tiles."""


def _numbers(problem: Problem, **integers: int) -> dict[str, triton.Argument]:
    numbers = {name: triton.integer(value, divisor=1) for name, value in integers.items()}
    return numbers | {"scale": triton.real(problem["sm_scale"] * log2(e))}


def _layout(problem: Problem) -> dict[str, ConfigValue]:
    return {"PAGE_SIZE": problem["page_size"], "PACKED": mla_row.is_packed(problem)}


def _tile_constants(problem: Problem, config: Config, gpu: Gpu) -> dict[str, ConfigValue]:
    return {
        "HEADS": problem["heads"], **_layout(problem), "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"], "STAGES": config["stages"],
        "BRANCHED": _uses_wgmma(config, gpu),
    }  # fmt: skip


def _row_tiles(problem: Problem, config: Config) -> int:
    """Row tiles that a sequence has at most."""
    return ceil(problem["max_q"] * problem["heads"] / config["block_m"])


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    numbers = _numbers(
        problem, max_q=problem["max_q"], width=problem["table_width"], heads=problem["heads"]
    )
    step = triton.step(
        f"{PACKAGE}.device:naive",
        (problem["batch"] * problem["max_q"], problem["heads"], 1),
        mla_row.arguments(ENTRY, problem) | numbers,
        _layout(problem),
        num_warps=8,
    )
    return Program((step,))


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    step = triton.step(
        f"{PACKAGE}.device:tiled",
        (_row_tiles(problem, config), problem["batch"], 1),
        mla_row.arguments(ENTRY, problem) | _numbers(problem, width=problem["table_width"]),
        _tile_constants(problem, config, gpu),
        num_warps=config["warps"],
    )
    return Program((step,))


def _partials() -> dict[str, triton.Argument]:
    return {name: triton.pointer(name, "float32") for name in ("partials", "sums")}


def _all_row_tiles(problem: Problem, config: Config) -> int:
    """Row tiles of all sequences, if each has as many as the longest."""
    return int(problem["batch"] * _row_tiles(problem, config))


def _range_constants(problem: Problem, config: Config, gpu: Gpu) -> dict[str, ConfigValue]:
    return {
        "ROW_TILES": _row_tiles(problem, config),
        "PADDED_TILES": next_power_of_two(_all_row_tiles(problem, config)),
        "NUM_PROGRAMS": config["per_sm"] * gpu.sms,
    }


def _split(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    num_programs, block_m = config["per_sm"] * gpu.sms, config["block_m"]
    last_merges, partial_rows = config["merge"] == "last", 2 * num_programs * block_m
    workspaces = {
        "partials": 4 * partial_rows * LATENT,
        "sums": 4 * partial_rows * 2,
        "arrivals": 4 * _all_row_tiles(problem, config) * last_merges,
    }
    block_d = min(LATENT, 1024 * config["warps"] // block_m)
    step = triton.step(
        f"{PACKAGE}.split:split",
        (num_programs, 1, 1),
        mla_row.arguments(ENTRY, problem)
        | _partials()
        | {"arrivals": triton.pointer("arrivals", "int32")}
        | _numbers(problem, batch=problem["batch"], width=problem["table_width"]),
        _tile_constants(problem, config, gpu)
        | _range_constants(problem, config, gpu)
        | {"LAST_MERGES": last_merges, "BLOCK_D": block_d},
        num_warps=config["warps"],
    )
    steps = (step,) if last_merges else (step, _combine(problem, config, gpu))
    return Program(steps, workspaces)


def _combine(problem: Problem, config: Config, gpu: Gpu) -> Step:
    """The launch that merges partial results where `split` does not."""
    num_row_tiles, block_m, rows = _all_row_tiles(problem, config), config["block_m"], 1
    while rows < block_m and num_row_tiles * block_m // rows > COMBINE_PROGRAMS * gpu.sms:
        rows *= 2
    arrays = mla_row.arguments(ENTRY, problem)
    return triton.step(
        f"{PACKAGE}.split:combine",
        (num_row_tiles, block_m // rows, 1),
        {name: arrays[name] for name in ("kv_lens", "cu_q", "out", "lse")}
        | _partials()
        | {"batch": triton.integer(problem["batch"], divisor=1)},
        {"HEADS": problem["heads"], "BLOCK_M": block_m, "BLOCK_N": config["block_n"]}
        | _range_constants(problem, config, gpu)
        | {"ROWS": rows},
        num_warps=4,
    )


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    for axis in ("batch", "heads"):
        if problem[axis] > MAX_GRID_Y:
            return f"{axis}={problem[axis]} is more than {MAX_GRID_Y}, the most on a grid's axis"
    return mla_row.illegal_cache(problem, gpu)


def _uses_wgmma(config: Config, gpu: Gpu) -> bool:
    """Whether wgmma or tcgen05 multiplies, which read operands where the loads have put them."""
    return bool(config["block_m"] >= 64 and gpu.arch in ("sm_90a", "sm_100a", "sm_103a"))


def _shared_bytes(config: Config, problem: Problem, gpu: Gpu) -> int:
    """Shared memory of queries, weights and stages.

    Triton loads pages ahead of rows, so that two of its stages take the memory of one.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    stages = max(1, (config["stages"] - 1) // 2)
    row_bytes = 2 * block_m * (ROW + block_n) + 1024
    if mla_row.is_packed(problem):  # decoded values, and memory to exchange values among threads
        return row_bytes + block_n * (PACKED * stages + 2 * ROW + 384)
    return row_bytes + block_n * 2 * ROW * (stages + _uses_wgmma(config, gpu))


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if (size := _shared_bytes(config, problem, gpu)) > gpu.shared_bytes:
        return (
            f"{size} bytes do not fit in shared memory: a program on {gpu.sku} has "
            f"{gpu.shared_bytes} at most"
        )
    return _illegal(config, problem, gpu)


def _illegal_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    num_row_tiles = _all_row_tiles(problem, config)
    if num_row_tiles > MAX_ROW_TILES:
        return f"{num_row_tiles} tiles of rows are more than {MAX_ROW_TILES}"
    return _illegal_tiled(config, problem, gpu)


def _spills(splits: bool, config: Config, problem: Problem, gpu: Gpu) -> bool:
    """Whether Triton 3.6 spills hundreds of bytes of a thread's registers (compiled, not run)."""
    block_m = config["block_m"]
    if gpu.arch not in ("sm_100a", "sm_103a") or block_m == 16:
        return False
    if mla_row.is_packed(problem):
        return bool(splits or block_m == 32)
    return bool(splits if block_m == 64 else config["block_n"] >= 16 * config["warps"])


def _unpromising(splits: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, rows = config["block_m"], problem["max_q"] * problem["heads"]
    if block_m > 16 and block_m >= 2 * rows:
        return f"tiles of {block_m} rows are at least half empty for {rows}"
    if config["block_n"] == 128 and block_m >= 4 * config["warps"]:
        return f"{config['warps']} warps spill registers for scores of {block_m} x 128"
    if block_m > 8 * config["warps"]:
        return f"{config['warps']} warps spill registers for {block_m} x {LATENT} accumulators"
    if _spills(splits, config, problem, gpu):
        return f"tiles of {block_m} rows spill a thread's registers on {gpu.arch}"
    return None


# ---- estimates ---------------------------------------------------------------------------------


START_US = 3.9
"""Launch, loads of the rows and of the first page numbers, and the results' way to memory. This and
the numbers below are fitted to 473 times of `tiled` and `split` on an H200."""
NEXT_US = 4.0
"""Microseconds until the next 64 rows of an SM have been loaded, and those before stored, which
overlaps with nothing: the SM has one program (28 times of `tiled` with more row tiles than SMs)."""
TILE_US = 1.7
"""Microseconds of a tile of tokens beside its loads and products: page numbers, maximum and
exponentials of the scores, and barriers."""
L2_SHARE = 1.5
"""Bytes that an SM loads over its share of what cost models take for L2's bandwidth."""
MMA_RATE, WGMMA_RATES, WGMMA_RATE = 0.38, {16: 0.44, 32: 0.7}, 0.72
"""Part of the peak that products reach: mma.sync on Hopper (of older GPUs, whose peak is that of
mma.sync, twice as much; not measured), and wgmma by the tokens of a tile."""
FEW_ROWS = 1.5
"""How much longer products of 16 rows take with eight warps than with four: each has less to do."""
MANY_PAGES = 1.2
"""How much longer products take where a tile has several pages: a thread holds an address for each
row."""
SERIAL = 0.47
"""Part of the shorter of loads and products that two stages do not hide."""
DECODE_US = 3.8e-5
"""Microseconds in which a program decodes an element of a packed row to 16 bits."""
MERGE_US, PARTIAL_TRIPS = 5.5, 3.1
"""Microseconds of the second launch, which merges, and how often partial results go to or come from
memory."""
LAST_US = 0.9
"""Microseconds in which the last program of a row tile adds one partial result to its sum, BLOCK_D
columns of it."""


def _tile_us(config: Config, problem: Problem, gpu: Gpu) -> float:
    """Time of a row tile against one tile of tokens on one SM: bytes from L2, and products.

    With wgmma each of two warpgroups computes half of the scores' columns and reads all rows for
    them, so that products are slower the fewer tokens a tile has. More than two stages overlap
    loads with products.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    is_packed = mla_row.is_packed(problem)
    rate = MMA_RATE * (2 if gpu.arch in ("sm_80", "sm_89") else 1)
    if _uses_wgmma(config, gpu):
        rate = WGMMA_RATES.get(block_n, WGMMA_RATE)
    load_bytes = block_n * row_length(problem.values) * (1 if is_packed else 2)
    load_us = load_bytes / (L2_SHARE * gpu.bandwidth * cost_model.L2_TO_DRAM / gpu.sms) * 1e6
    flops = 2 * block_m * block_n * (ROW + LATENT)
    math_us = flops / (rate * gpu.flops[problem["dtype"]] / gpu.sms) * 1e6
    if block_n > problem["page_size"]:
        math_us *= MANY_PAGES
    if block_m == 16 and config["warps"] == 8:
        math_us *= FEW_ROWS
    if is_packed:
        math_us += DECODE_US * block_n * ROW
    shown = SERIAL * min(load_us, math_us) if config["stages"] == 2 else 0.0
    return TILE_US + max(load_us, math_us) + shown


def _tiles(config: Config, problem: Problem) -> tuple[int, int]:
    """Row tiles, and tiles of tokens of each on average."""
    row_tiles = items = 0
    for group in query_groups(problem):
        tiles = group.sequences * ceil(group.queries * problem["heads"] / config["block_m"])
        row_tiles += tiles
        items += tiles * max(1, ceil(group.tokens / config["block_n"]))
    return max(row_tiles, problem["batch"], 1), max(1, ceil(items / max(row_tiles, 1)))


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 50 * problem["heads"] * cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    row_tiles, tiles = _tiles(config, problem)
    longest = ceil(problem["table_width"] * problem["page_size"] / config["block_n"])
    waves = ceil(row_tiles / gpu.sms)
    next_us = NEXT_US * (waves - 1) * config["block_m"] / 64
    return _work_us(max(waves * tiles, longest), problem, config, gpu) + next_us


def _estimate_split(problem: Problem, config: Config, gpu: Gpu) -> float:
    """The ranges, and the merge: by a second launch, or by one program for each row tile."""
    row_tiles, tiles = _tiles(config, problem)
    num_programs = min(config["per_sm"] * gpu.sms, row_tiles * tiles)
    rounds = ceil(row_tiles * tiles / min(num_programs, gpu.sms))
    if config["merge"] == "last":  # one partial result after another, BLOCK_D columns at a time
        turns = 1 + config["block_m"] / (2 * config["warps"])
        merge_us = LAST_US * (num_programs / row_tiles + 1) * turns
    else:
        partial_us = config["block_m"] * LATENT * 4 / gpu.bandwidth * 1e6
        merge_us = PARTIAL_TRIPS * num_programs * partial_us + MERGE_US
    return _work_us(rounds, problem, config, gpu) + merge_us


def _work_us(rounds: int, problem: Problem, config: Config, gpu: Gpu) -> float:
    """``rounds`` tiles of tokens one after the other on an SM; memory may take longer."""
    work_us = rounds * _tile_us(config, problem, gpu)
    return START_US + max(cost_model.copy_us(ENTRY.bytes_moved(problem), gpu), work_us)


ARCHS = ("sm_80+",)
TECHNIQUES = {"asynchronous copy": "LDGSTS"}
# The first of equal estimates is the default: the most stages, which therefore come first.
SPACE = {
    "stages": (7, 5, 2), "block_m": (64, 16, 32), "block_n": (64, 32, 16, 128), "warps": (8, 4),
}  # fmt: skip

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        entry="flashmla",
        language="triton",
        variant="naive",
        summary="one query token and head a program; any problem",
        archs=ARCHS,
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_estimate_naive,
        rank=0,
    ),
    Implementation(
        entry="flashmla",
        language="triton",
        variant="tiled",
        summary="a tile of a sequence's rows over all of its visible keys; latents loaded once",
        archs=ARCHS,
        space=SPACE,
        illegal=_illegal_tiled,
        unpromising=partial(_unpromising, False),
        program=_tiled,
        estimate=_estimate_tiled,
        techniques=TECHNIQUES,
        rank=1,
    ),
    Implementation(
        entry="flashmla",
        language="triton",
        variant="split",
        summary="an equal range of all tiles a program; the last to arrive, or a launch, merges",
        archs=ARCHS,
        space=SPACE | {"per_sm": (1, 2, 3, 4), "merge": ("last", "launch")},
        illegal=_illegal_split,
        unpromising=partial(_unpromising, True),
        program=_split,
        estimate=_estimate_split,
        techniques=TECHNIQUES,
        rank=2,
    ),
)
