"""`paged_attn` in Triton: naive, tiled (for prefill), split (for decode, in equal ranges).

Programs gather the rows of cached tokens by pointers through the block table, so that any page size
serves. Where pages are no smaller than a tile, TMA loads them instead: tma and split_tma.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, e, log2
from typing import Any

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, ConfigValue, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.architectures import illegal_float8
from kernelcat.kernels.triton.common.grid import MAX_GRID_Y
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference._kv_cache import FP8, NVFP4, cache_row, row_bytes
from kernelcat.reference.paged_attn import ENTRY, is_cut, most_visible, sm_scale, tiles_seen
from kernelcat.runtime.gpu import Gpu

PACKAGE = "kernelcat.kernels.triton.paged_attn"
BYTES_IN_FLIGHT = 64 << 10
"""Bytes that an SM must have in flight to use the whole bandwidth."""
MAX_DECODED = 8192
"""Elements of a tile of float8 or NVFP4 that `tiled` decodes without spills."""
MAX_BATCH = 4096
"""Sequences at most whose lengths a program of `split` holds in registers."""


def _group(problem: Problem) -> int:
    """Query heads that share a key-value head."""
    return int(problem["heads"] // problem["kv_heads"])


def _max_rows(problem: Problem) -> int:
    """Rows that a sequence has at most for one key-value head: query tokens and their heads."""
    return int(problem["max_q"] * _group(problem))


def _is_empty(problem: Problem) -> bool:
    return not problem["batch"] or not problem["tokens"]


def _dtype(name: str, dtype: str) -> str:
    """Triton's type of the elements of array ``name``: bytes for NVFP4, which Triton lacks.

    Block scales are bytes too: before sm_89 Triton compiles not even a null pointer to float8.
    """
    return "uint8" if dtype == NVFP4 or name.endswith("block_scale") else dtype


def _arrays(problem: Problem, tma_rows: int = 0) -> dict[str, triton.Argument]:
    """Every tensor of the entry, null pointers for absent ones.

    With ``tma_rows`` the caches are descriptors, and a load has ``tma_rows`` tokens of one head.
    """
    arguments = {
        tensor.name: triton.pointer(tensor.name, _dtype(tensor.name, tensor.dtype_of(problem)))
        for tensor in ENTRY.tensors
    }
    if tma_rows:
        dtype, row = _dtype("k_cache", problem["kv_dtype"]), cache_row(problem.values)
        shape = (problem["pages"] * problem["page_size"], problem["kv_heads"] * row)
        for name in ("k_cache", "v_cache"):
            arguments[name] = triton.descriptor(name, dtype, shape, (tma_rows, row))
    return arguments


def _numbers(problem: Problem) -> dict[str, triton.Argument]:
    scale = sm_scale(problem) * log2(e)
    return {
        "width": triton.integer(problem["table_width"], divisor=1),
        "window": triton.integer(problem["window"], divisor=1),
        "scale": triton.real(scale),
        "softcap": triton.real(problem["softcap"]),
    }


def _constants(problem: Problem) -> dict[str, ConfigValue]:
    return {
        "GROUP": _group(problem),
        "KV_HEADS": problem["kv_heads"],
        "HEAD_DIM": problem["head_dim"],
        "PAGE_SIZE": problem["page_size"],
        "WINDOW": problem["window"] > 0,
        "SOFTCAP": problem["softcap"] > 0,
        "HAS_SINKS": problem["has_sinks"],
        "HAS_SCALES": problem["has_scales"],
        "PAGE_SCALES": problem["page_scales"],
        "NVFP4": problem["kv_dtype"] == NVFP4,
    }


def _tile_constants(config: Config, tma: bool) -> dict[str, ConfigValue]:
    return {
        "BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "STAGES": config["stages"],
        "TMA": tma,
    }  # fmt: skip


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    max_q = {"max_q": triton.integer(problem["max_q"], divisor=1)}
    step = triton.step(
        f"{PACKAGE}.device:naive",
        (problem["batch"] * problem["max_q"], problem["heads"], 1),
        _arrays(problem) | max_q | _numbers(problem),
        _constants(problem),
        num_warps=4,
    )
    return Program((step,))


def _tiled(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    row_tiles = ceil(_max_rows(problem) / config["block_m"])
    step = triton.step(
        f"{PACKAGE}.device:tiled",
        (row_tiles, problem["kv_heads"], problem["batch"]),
        _arrays(problem, tma * config["block_n"]) | _numbers(problem),
        _constants(problem) | _tile_constants(config, tma),
        num_warps=config["warps"],
    )
    return Program((step,))


def _split(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _is_empty(problem):
        return Program(())
    num_programs, block_m, batch = config["per_sm"] * gpu.sms, config["block_m"], problem["batch"]
    partial_rows = 2 * num_programs * block_m
    workspaces = {
        "partials": 4 * partial_rows * problem["head_dim"],
        "sums": 4 * partial_rows * 2,
        "arrivals": 4 * batch * problem["kv_heads"],
    }
    partials = {
        "partials": triton.pointer("partials", "float32"),
        "sums": triton.pointer("sums", "float32"),
        "arrivals": triton.pointer("arrivals", "int32"),
        "batch": triton.integer(batch, divisor=1),
    }
    step = triton.step(
        f"{PACKAGE}.split:split",
        (num_programs, 1, 1),
        _arrays(problem, tma * config["block_n"]) | partials | _numbers(problem),
        _constants(problem)
        | _tile_constants(config, tma)
        | {"BATCH": next_power_of_two(batch), "NUM_PROGRAMS": num_programs},
        num_warps=config["warps"],
    )
    return Program((step,), workspaces)


# ---- which configurations can run, and which are worth a try -------------------------------------


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    for axis in ("batch", "heads"):
        if problem[axis] > MAX_GRID_Y:
            return f"{axis}={problem[axis]} is more than {MAX_GRID_Y}, the most on a grid's axis"
    return illegal_float8(gpu) if problem["kv_dtype"] in (FP8, NVFP4) else None


def _illegal_tma(config: Config, problem: Problem) -> str | None:
    page_size, block_n = problem["page_size"], config["block_n"]
    if page_size < block_n:
        return f"page_size={page_size} must be at least block_n={block_n}: TMA loads from one page"
    if problem["pages"] * page_size >= 1 << 31:
        return "the slots of all pages are more than a descriptor's 32-bit coordinates reach"
    return None


def _illegal_tiled(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n, stages, dim = config["block_n"], config["stages"], problem["head_dim"]
    if tma and (reason := _illegal_tma(config, problem)):
        return reason
    stage_bytes = 2 * block_n * row_bytes(problem)
    q_bytes = 2 * config["block_m"] * dim
    decoded_bytes = 2 * block_n * dim if problem["kv_dtype"] == NVFP4 else 0
    if stage_bytes * stages + q_bytes + decoded_bytes > gpu.shared_bytes:
        return (
            f"{stages} stages of {stage_bytes} bytes and tiles of {q_bytes + decoded_bytes} bytes "
            f"do not fit in shared memory: {gpu.sku} has {gpu.shared_bytes} bytes"
        )
    return _illegal(config, problem, gpu)


def _illegal_split(tma: bool, config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if config["block_m"] < _max_rows(problem):
        return f"{_max_rows(problem)} rows are more than a tile of block_m={config['block_m']}"
    if problem["batch"] > MAX_BATCH:
        return f"batch={problem['batch']} must be at most {MAX_BATCH}"
    return _illegal_tiled(tma, config, problem, gpu)


def _unpromising(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_m, block_n, dim = config["block_m"], config["block_n"], problem["head_dim"]
    if block_m > 16 and block_m >= 2 * _max_rows(problem):
        return f"tiles of {block_m} rows are at least half empty for {_max_rows(problem)}"
    if block_m * (dim + block_n) > 128 * 32 * config["warps"]:
        return (
            f"{config['warps']} warps spill registers for a tile of {block_m} x ({dim} + {block_n})"
        )
    return None


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    block_n, dim = config["block_n"], problem["head_dim"]
    if problem["kv_dtype"] in (FP8, NVFP4) and block_n * dim > MAX_DECODED:
        return f"decoded tiles of {block_n} x {dim} spill registers"
    return _unpromising(config, problem, gpu)


# ---- estimates -----------------------------------------------------------------------------------


MMA_EFFICIENCY = 0.55
"""Part of the tensor cores' peak that products reach while no softmax is computed."""
SOFTMAX_INSTRUCTIONS = 8.2
"""Instructions of a thread for a score of a tile of 64 or more rows: maximum, exponential, sum."""
CAP_INSTRUCTIONS = 5
"""Instructions more for a score that a softcap bounds (tile.py): exponential, reciprocal, sums."""
TOKEN_INSTRUCTIONS = 400
"""Instructions for a cached token of a head, whatever its dimension: page, address, softmax."""
ELEMENT_INSTRUCTIONS = {FP8: 14.8, NVFP4: 18.0}
"""Instructions to make 16 bits of an element of the cache; elements of 16 bits take 2."""
PROGRAM_BANDWIDTH = 27e9
"""Bytes a second that one program streams that has an SM to itself, with its waits at each tile."""
TILE_US = 0.84
"""Microseconds that a program of `tiled` waits at each tile of tokens: the table, then the loads.
This and the next numbers are fitted to 35 races of an H100 and an H200."""
TILE_LOAD_US, TILE_ROWS = 0.45, 0.16
"""Microseconds for 64 tokens of 128 elements, and the part of it that 16 rows of products add."""
CAPPED = 2.0
"""How much longer that takes with a softcap."""
NEXT_SHARE = 0.5
"""Part of the tiles of later programs that those beside them do not hide."""
START_END_US, WAVE_US = 3.4, 1.2
"""From the launch to the first scores, and from the last values to the end; and of each wave of
programs, also of those that find no rows."""
OVERLAP = 1.85
"""Order of the norm that adds up the tiles of a program, and the bytes or the work of all."""
SPLIT_ROWS = 0.75
"""Power by which programs of `split` slow down with the rows of their tiles. This and the next
numbers are fitted to 120 times of 30 problems on an H200."""
SPLIT_US = 9.0
"""Until programs know their ranges, and from the last partial result to the merged one."""
PART_US, PART_SIZE = 0.35, 0.7
"""Microseconds in which the last program of a head adds up a partial result of 16 rows of 128
elements, one after another, and the power by which larger ones take longer."""


def _bytes_us(problem: Problem, gpu: Gpu) -> float:
    """The time of the cache's bytes, read by all SMs."""
    rate = gpu.bandwidth * cost_model.row_share(row_bytes(problem))
    return ENTRY.bytes_moved(problem) / rate * 1e6


def _tile_us(problem: Problem, config: Config) -> float:
    """The time in which one program of `tiled` goes through a tile of tokens."""
    size = config["block_n"] / 64 * problem["head_dim"] / 128
    size *= CAPPED if problem["softcap"] else 1.0
    return float(TILE_US + TILE_LOAD_US * size * (1 + TILE_ROWS * config["block_m"] / 16))


def _tiles(problem: Problem, config: Config) -> tuple[int, float]:
    """Row tiles of one key-value head, and the tiles of tokens that each of them sees on average:
    the last one is half empty, and with a window the first one, too."""
    row_tiles, tokens = tiles_seen(problem, config["block_m"])
    half_empty = 2 if is_cut(problem) else 1
    return row_tiles, max(tokens / row_tiles / config["block_n"] + 0.5 * half_empty, 1.0)


def _busy_us(problem: Problem, config: Config, programs: int, gpu: Gpu) -> float:
    """The time of products, softmax and decoding: every row tile reads all of its tokens."""
    busy = min(programs, gpu.sms)
    row_tiles, tiles = _tiles(problem, config)
    tokens = row_tiles * tiles * config["block_n"] * problem["kv_heads"]
    scores = tokens * config["block_m"]
    flops = 4 * problem["head_dim"] * scores
    math_us = flops / (gpu.flops[problem["dtype"]] * MMA_EFFICIENCY * busy / gpu.sms) * 1e6
    if config["block_m"] >= 64:
        per_score = SOFTMAX_INSTRUCTIONS + (CAP_INSTRUCTIONS if problem["softcap"] else 0)
        return math_us + cost_model.issue_us(per_score * scores, gpu, busy)
    per_element = ELEMENT_INSTRUCTIONS.get(problem["kv_dtype"], 2)
    per_token = TOKEN_INSTRUCTIONS + per_element * 2 * problem["head_dim"]
    return max(math_us, cost_model.issue_us(per_token * tokens, gpu, busy))


def _estimate_naive(problem: Problem, config: Config, gpu: Gpu) -> float:
    bytes_us = _bytes_us(problem, gpu)
    math_us = ENTRY.flops(problem) / (gpu.flops[problem["dtype"]] * 0.5) * 1e6
    return 50 * _group(problem) * max(bytes_us, math_us)


def _residents(problem: Problem, config: Config, gpu: Gpu) -> int:
    """Programs that run at once: a stage less than its number is in shared memory."""
    stage_bytes = 2 * config["block_n"] * row_bytes(problem)
    shared = (config["stages"] - 1) * stage_bytes + 2 * config["block_m"] * problem["head_dim"]
    by_registers = 12 // config["warps"]  # of 168 registers a thread
    return int(gpu.sms * max(1, min(gpu.shared_bytes // shared, by_registers)))


def _estimate_tiled(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> float:
    """The tiles of the longest sequence and the waves of programs, beside bytes or work."""
    if _is_empty(problem):
        return cost_model.LAUNCH_US
    row_tiles = ceil(_max_rows(problem) / config["block_m"])
    programs = row_tiles * problem["kv_heads"] * problem["batch"]
    head_row_tiles, mean_tiles = _tiles(problem, config)
    busy = head_row_tiles * problem["kv_heads"]  # programs with rows
    work_us = _busy_us(problem, config, busy, gpu)
    if config["block_m"] >= 64 and not tma:
        work_us *= 1.1  # addresses of rows, which TMA works out
    waves = ceil(programs / _residents(problem, config, gpu))
    longest_tiles = ceil(most_visible(problem, config["block_m"]) / config["block_n"])
    longest_tiles += is_cut(problem)
    tile_us = _tile_us(problem, config)
    later_us = WAVE_US + NEXT_SHARE * mean_tiles * tile_us * busy / programs
    chain_us = longest_tiles * tile_us + (waves - 1) * later_us
    steady_us = max(_bytes_us(problem, gpu), work_us)
    us = (chain_us**OVERLAP + steady_us**OVERLAP) ** (1 / OVERLAP)
    return float(cost_model.LAUNCH_US + START_END_US + us)


def _estimate_split(tma: bool, problem: Problem, config: Config, gpu: Gpu) -> float:
    """Bytes or work, divided evenly, and the merge of the longest sequence's parts; few bytes in
    flight do not cover the latency of memory."""
    if _is_empty(problem):
        return cost_model.LAUNCH_US
    stage_bytes = 2 * config["block_n"] * row_bytes(problem)
    programs = config["per_sm"] * gpu.sms
    in_flight = config["per_sm"] * (config["stages"] - 1) * stage_bytes
    flow = min(1.0, 0.7 + 0.3 * in_flight / BYTES_IN_FLIGHT)
    work_us = _busy_us(problem, config, gpu.sms, gpu)
    program_us = ENTRY.bytes_moved(problem) / (programs * PROGRAM_BANDWIDTH) * 1e6
    us = max(max(_bytes_us(problem, gpu), program_us) / flow, work_us)
    us *= (config["block_m"] / 16) ** SPLIT_ROWS
    return float(cost_model.LAUNCH_US + SPLIT_US + us + _merge_us(problem, config, programs))


def _merge_us(problem: Problem, config: Config, programs: int) -> float:
    """The time in which one program of `split` merges the parts of the longest sequence."""
    row_tiles, tiles = _tiles(problem, config)
    share = max(row_tiles * tiles * problem["kv_heads"] / programs, 1.0)
    parts = most_visible(problem, config["block_m"]) / config["block_n"] / share
    size = config["block_m"] * problem["head_dim"] / (16 * 128)
    return float(PART_US * size**PART_SIZE * parts) if parts > 1 else 0.0


ARCHS = ("sm_80+",)

NAIVE = Implementation(
    entry="paged_attn",
    language="triton",
    variant="naive",
    summary="one query token and head a program; any shape",
    archs=ARCHS,
    space={},
    illegal=_illegal,
    program=_naive,
    estimate=_estimate_naive,
    rank=0,
)

# The first of equal estimates is the default: the most stages, which therefore come first.
TILED_SPACE = {
    "stages": (4, 3, 2), "block_m": (128, 64, 16), "block_n": (64, 128, 32), "warps": (4, 8),
}  # fmt: skip
SPLIT_SPACE = {
    "stages": (6, 5, 4, 3, 2), "block_m": (16, 32, 64, 128), "block_n": (64, 128, 32),
    "warps": (4, 8), "per_sm": (2, 1, 3, 4),
}  # fmt: skip


def _variant(
    variant: str,
    tma: bool,
    illegal: Callable[..., str | None],
    program: Callable[..., Program],
    estimate: Callable[..., float],
    unpromising: Callable[..., str | None] = _unpromising,
    **fields: Any,
) -> Implementation:
    """The functions take as their first argument whether TMA loads the tiles."""
    return Implementation(
        entry="paged_attn",
        language="triton",
        variant=variant,
        archs=("sm_90a",) if tma else ARCHS,
        illegal=partial(illegal, tma),
        unpromising=unpromising,
        program=partial(program, tma),
        estimate=partial(estimate, tma),
        techniques={"tma": "UTMALDG"} if tma else {"asynchronous copy": "LDGSTS"},
        **fields,
    )


_tiled_variant = partial(
    _variant,
    space=TILED_SPACE,
    illegal=_illegal_tiled,
    program=_tiled,
    estimate=_estimate_tiled,
    unpromising=_unpromising_tiled,
)
_split_variant = partial(
    _variant, space=SPLIT_SPACE, illegal=_illegal_split, program=_split, estimate=_estimate_split
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    NAIVE,
    _tiled_variant(
        "tiled", False, rank=1, summary="a tile of tokens and heads over all of its visible keys"
    ),
    _tiled_variant(
        "tma", True, rank=2, summary="tiled, with TMA where pages are no smaller than a tile"
    ),
    _split_variant(
        "split_tma", True, rank=3, summary="split, with TMA where pages are no smaller than a tile"
    ),
    _split_variant(
        "split", False, rank=4,
        summary="an equal range of all tiles a program, partial results merged at the end",
    ),
)  # fmt: skip
