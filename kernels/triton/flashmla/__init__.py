"""`flashmla` in Triton: naive, tiled (a tile of rows a program), split (equal shares).

Blocks gather their tokens' rows through the block table by pointers, so that any page size serves.
"""

from math import ceil, e, log2

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program, Step
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.flashmla.cache import is_packed, reject_packed, with_cache
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.reference._mla_row import LATENT, PACKED, ROW
from kernelcat.reference.flashmla import ENTRY, row_length
from kernelcat.runtime.gpu import Gpu

PACKAGE = "kernelcat.kernels.triton.flashmla"
MAX_ASKING = 4096
"""Tiles of rows whose lengths a program of `split` has in registers."""
COMBINING = 8
"""Programs of `combine` an SM, if tiles of rows are no more."""


def _numbers(problem: Problem, **integers: int) -> dict[str, triton.Argument]:
    numbers = {name: triton.integer(value, divisor=1) for name, value in integers.items()}
    return numbers | {"scale": triton.real(problem["sm_scale"] * log2(e))}


def _layout(problem: Problem) -> dict[str, ConfigValue]:
    return {"PAGE_SIZE": problem["page_size"], "PACKED": is_packed(problem)}


def _tile(problem: Problem, config: Config, gpu: Gpu) -> dict[str, ConfigValue]:
    return {
        "HEADS": problem["heads"], **_layout(problem), "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"], "STAGES": config["stages"],
        "APART": _uses_wgmma(config, gpu),
    }  # fmt: skip


def _row_tiles(problem: Problem, config: Config) -> int:
    """Tiles of a sequence's rows, at most."""
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
        with_cache(ENTRY, problem) | numbers,
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
        with_cache(ENTRY, problem) | _numbers(problem, width=problem["table_width"]),
        _tile(problem, config, gpu),
        num_warps=config["warps"],
    )
    return Program((step,))


def _pieces(*names: str) -> dict[str, triton.Argument]:
    return {name: triton.pointer(name, "float32") for name in names}


def _split(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if not problem["tokens"]:
        return Program(())
    programs, block_m = config["per_sm"] * gpu.sms, config["block_m"]
    asking, last_merges = problem["batch"] * _row_tiles(problem, config), config["merge"] == "last"
    workspaces = {
        "partials": 2 * programs * block_m * LATENT * 4,
        "sums": 2 * programs * block_m * 2 * 4,
        "arrivals": asking * 4 * last_merges,
    }
    shares: dict[str, ConfigValue] = {
        "ROW_TILES": _row_tiles(problem, config),
        "ASKING": 1 << (asking - 1).bit_length(),
        "NUM_PROGRAMS": programs,
    }
    columns = min(LATENT, 1024 * config["warps"] // block_m)
    step = triton.step(
        f"{PACKAGE}.split:split",
        (programs, 1, 1),
        with_cache(ENTRY, problem)
        | _pieces("partials", "sums")
        | {"arrivals": triton.pointer("arrivals", "int32")}
        | _numbers(problem, batch=problem["batch"], width=problem["table_width"]),
        _tile(problem, config, gpu) | shares | {"LAST_MERGES": last_merges, "BLOCK_D": columns},
        num_warps=config["warps"],
    )
    steps = (step,) if last_merges else (step, _combine(problem, config, asking, shares, gpu))
    return Program(steps, workspaces)


def _combine(
    problem: Problem, config: Config, asking: int, shares: dict[str, ConfigValue], gpu: Gpu
) -> Step:
    """The launch that merges what ``asking`` tiles of rows are left in."""
    block_m, rows = config["block_m"], 1
    while rows < block_m and asking * block_m // rows > COMBINING * gpu.sms:
        rows *= 2
    arrays = with_cache(ENTRY, problem)
    return triton.step(
        f"{PACKAGE}.split:combine",
        (asking, block_m // rows, 1),
        {name: arrays[name] for name in ("kv_lens", "cu_q", "out", "lse")}
        | _pieces("partials", "sums")
        | {"batch": triton.integer(problem["batch"], divisor=1)},
        {"HEADS": problem["heads"], "BLOCK_M": block_m, "BLOCK_N": config["block_n"]}
        | shares
        | {"ROWS": rows},
        num_warps=4,
    )


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["batch"] > 65535 or problem["heads"] > 65535:
        return "a grid's second axis has 65535 blocks at most"
    return reject_packed(problem, gpu)


def _uses_wgmma(config: Config, gpu: Gpu) -> bool:
    """Or tcgen05: products read the tiles where the loads put them."""
    return bool(config["block_m"] >= 64 and gpu.arch in ("sm_90a", "sm_100a", "sm_103a"))


def _shared_bytes(config: Config, problem: Problem, gpu: Gpu) -> int:
    """Of queries, weights and buffers. Two of Triton's stages make one: pages are loaded ahead."""
    block_m, block_n = config["block_m"], config["block_n"]
    buffers = max(1, (config["stages"] - 1) // 2)
    rows = 2 * block_m * (ROW + block_n) + 1024
    if is_packed(problem):  # the values in dtype, and room to bring them there
        return rows + block_n * (PACKED * buffers + 2 * ROW + 384)
    return rows + block_n * 2 * ROW * (buffers + _uses_wgmma(config, gpu))


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, rows = config["block_m"], problem["max_q"] * problem["heads"]
    if reason := _reject(config, problem, gpu):
        return reason
    if block_m > 16 and block_m >= 2 * rows:
        return f"tiles of {block_m} rows are at least half empty for {rows}"
    if (size := _shared_bytes(config, problem, gpu)) > gpu.shared_bytes:
        return f"{size} bytes do not fit in shared memory"
    if block_m > 8 * config["warps"]:
        return f"{config['warps']} warps have no registers for {block_m} x {LATENT} sums"
    return None


def _reject_split(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    asking = problem["batch"] * _row_tiles(problem, config)
    if asking > MAX_ASKING:
        return f"{asking} tiles of rows are more than {MAX_ASKING}"
    return _reject_tiled(config, problem, gpu)


# ---- estimates ---------------------------------------------------------------------------------


def _tile_us(config: Config, problem: Problem, gpu: Gpu) -> float:
    """A tile of rows against one of tokens on one SM: bytes out of L2 and products.

    wgmma makes half of the scores' columns in either warpgroup and reads all rows for them, so that
    it is the slower the fewer tokens there are. Loads hide behind products where stages are many.
    """
    block_m, block_n = config["block_m"], config["block_n"]
    row = row_length(problem.values) * (1 if is_packed(problem) else 2)
    rate = 0.4 if gpu.arch in ("sm_80", "sm_89") else 0.2
    if _uses_wgmma(config, gpu):
        rate = {16: 0.25, 32: 0.45}.get(block_n, 0.6)
    load_us = block_n * row / (gpu.bandwidth * cost_model.L2_TO_DRAM / gpu.sms) * 1e6
    flops = 2 * block_m * block_n * (ROW + LATENT)
    math_us = flops / (rate * gpu.flops[problem["dtype"]] / gpu.sms) * 1e6
    if block_n > problem["page_size"]:
        math_us *= 1.1  # a thread has an address for each of its rows
    return 0.2 + (max(load_us, math_us) if config["stages"] > 2 else load_us + math_us)


def _tiles(config: Config, problem: Problem) -> tuple[int, int]:
    """Tiles of rows, and tiles of tokens of each, if lengths are what the table has room for."""
    room = problem["table_width"] * problem["page_size"]
    asking = ceil(problem["tokens"] * problem["heads"] / config["block_m"])
    return max(asking, problem["batch"], 1), max(1, ceil(room / config["block_n"]))


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    return 50 * problem["heads"] * cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)


def _estimate_tiled(problem: Problem, config: Config, gpu: Gpu) -> float:
    asking, tiles = _tiles(config, problem)
    busy = ceil(asking / gpu.sms) * tiles * _tile_us(config, problem, gpu)
    return max(cost_model.copy_us(ENTRY.bytes_moved(problem), gpu), busy + cost_model.LAUNCH_US)


def _estimate_split(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Shares, and the merge: by programs of their own, or by one for each tile of rows."""
    asking, tiles = _tiles(config, problem)
    programs = min(config["per_sm"] * gpu.sms, asking * tiles)
    busy = asking * tiles / min(programs, gpu.sms) * _tile_us(config, problem, gpu)
    if config["merge"] == "last":  # piece after piece, and for some columns at a time
        rounds = 1 + config["block_m"] / (2 * config["warps"])
        merge_us = 0.5 * (programs / asking + 1) * rounds
    else:
        piece_us = config["block_m"] * LATENT * 4 / gpu.bandwidth * 1e6
        merge_us = 2 * programs * piece_us + cost_model.LAUNCH_US + 1.0
    moved_us = cost_model.copy_us(ENTRY.bytes_moved(problem), gpu)
    return max(moved_us, busy + cost_model.LAUNCH_US) + merge_us


ARCHS = ("sm_80+",)
TECHNIQUES = {"asynchronous copy": "LDGSTS"}
TILES = {
    "block_m": (64, 16, 32), "block_n": (64, 32, 16, 128), "stages": (2, 5, 7), "warps": (8, 4),
}  # fmt: skip

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    implementation(
        entry="flashmla",
        variant="naive",
        summary="one query token and head a program; any problem",
        archs=ARCHS,
        space={},
        illegal=_reject,
        program=_naive,
        estimate=_estimate_naive,
        rank=0,
    ),
    implementation(
        entry="flashmla",
        variant="tiled",
        summary="a tile of a sequence's rows over all that they see; latents loaded once",
        archs=ARCHS,
        space=TILES,
        illegal=_reject_tiled,
        program=_tiled,
        estimate=_estimate_tiled,
        techniques=TECHNIQUES,
        rank=1,
    ),
    implementation(
        entry="flashmla",
        variant="split",
        summary="equal shares of all tiles; pieces merged by the last to arrive, or a launch more",
        archs=ARCHS,
        space=TILES | {"per_sm": (1, 2, 3, 4), "merge": ("last", "launch")},
        illegal=_reject_split,
        program=_split,
        estimate=_estimate_split,
        techniques=TECHNIQUES,
        rank=2,
    ),
)
