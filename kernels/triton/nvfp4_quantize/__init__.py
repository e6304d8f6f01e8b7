"""`nvfp4_quantize` in Triton: naive (one row a program), tiled (tiles of rows and blocks).

One kernel: everything from RMSNorm to the packed codes happens in registers.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.common.powers import next_power_of_two
from kernelcat.reference._fp4 import block_of, scale_sizes
from kernelcat.reference.nvfp4_quantize import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.nvfp4_quantize.device:quantize"
ARCHS = ("sm_80+",)
INSTRUCTIONS = {"nvfp4": 33.5, "mxfp4": 30.5}
"""Instructions of a thread for an element: the maximum of its block, its code, its share of the
scale."""
ROW_SUM_US = 1.2
"""The sum of a row's squares, a barrier, and the second pass over the row."""
MAX_K = 1 << 16
"""The longest row of one program: Triton's limit is higher, but registers are too few."""


def _padded_row(problem: Problem) -> int:
    """Columns of a program that has whole rows: a power of two, so many that scales fill tiles."""
    return max(128, next_power_of_two(problem["K"]))


def _program(problem: Problem, rows: int, cols: int, warps: int) -> Program:
    m, k = problem["M"], problem["K"]
    if m == 0 or k == 0:
        return Program(())
    scale_rows, scale_cols = (size.of(problem.values) for size in scale_sizes("M"))
    num_programs = ceil(scale_rows / rows) * ceil(scale_cols * block_of(problem.values) / cols)
    dtype = problem["dtype"]
    types = {
        "x": dtype, "global_scale": "float32", "weight": dtype, "signs": "float32",
        "seed": "int32", "q": "uint8", "scale": "uint8",
    }  # fmt: skip
    step = triton.step(
        KERNEL,
        (num_programs, 1, 1),
        {name: triton.pointer(name, dtype) for name, dtype in types.items()}
        | {"M": triton.integer(m, divisor=1), "K": triton.integer(k)}
        | {"eps": triton.real(problem["eps"])},
        {
            "NVFP4": problem["format"] == "nvfp4",
            "SWIZZLED": problem["scale_layout"] == "swizzled",
            "RMS_NORM": problem["rms_norm"],
            "HADAMARD": problem["hadamard"],
            "STOCHASTIC": problem["stochastic"],
            "ROWS": rows,
            "COLS": cols,
        },
        num_warps=warps,
    )
    return Program((step,))


def _naive_warps(problem: Problem) -> int:
    """Warps whose threads have 32 elements each, where that are no more than 32 warps."""
    return min(32, ceil(_padded_row(problem) / 1024))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, 1, _padded_row(problem), _naive_warps(problem))


def _cols(problem: Problem, config: Config) -> int:
    """Columns of a program: all of them for RMSNorm."""
    return _padded_row(problem) if problem["rms_norm"] else config["cols"]


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], _cols(problem, config), config["warps"])


def _illegal_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] > MAX_K:
        return f"K={problem['K']} is more than the {MAX_K} elements of a row that a program holds"
    return None


def _per_thread(config: Config, problem: Problem) -> int:
    """Elements of a thread."""
    return int(config["rows"] * _cols(problem, config) // (32 * config["warps"]))


def _illegal_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    per_thread = _per_thread(config, problem)
    if problem["rms_norm"] and per_thread > 32:
        return f"{per_thread} elements a thread of whole rows: more than 32 fill the registers"
    return None


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, per_thread = config["rows"], _per_thread(config, problem)
    if problem["rms_norm"] and config["cols"] != SPACE["cols"][0]:
        return "RMSNorm takes whole rows: every value of cols comes to the same"
    if not 8 <= per_thread <= 64:
        return f"{per_thread} elements a thread: 8 fill one load, more than 64 the registers"
    if rows > 1 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or instructions, those for masked elements included; then the sums of whole rows."""
    m, k = problem["M"], problem["K"]
    is_naive = "rows" not in config
    rows, warps = config.get("rows", 1), config.get("warps", _naive_warps(problem))
    cols = _padded_row(problem) if is_naive else _cols(problem, config)
    row_parts, col_parts = max(1, ceil(m / rows)), max(1, ceil(k / cols))
    per_thread = rows * cols / (32 * warps)
    resident = max(1, min(64 // warps, int(65536 / (32 * warps * (32 + 2 * per_thread)))))
    per_element = INSTRUCTIONS[problem["format"]]
    per_element *= 1.6 if problem["rms_norm"] else 2.3 if problem["stochastic"] else 1.0
    per_element *= 1.05 if problem["scale_layout"] == "swizzled" else 1.0
    blocks = row_parts * col_parts
    us = cost_model.stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=blocks, rounds=blocks / (gpu.sms * resident),
        instructions=per_element * blocks * rows * cols, waits_us=0.01 * warps**0.5,
    )  # fmt: skip
    return us + (ROW_SUM_US if problem["rms_norm"] else 0.0)


SPACE = {"rows": (1, 4, 16), "cols": (128, 256, 512, 1024), "warps": (2, 4, 8, 16)}

NAIVE = Implementation(
    entry="nvfp4_quantize",
    language="triton",
    variant="naive",
    summary="one row a program",
    archs=ARCHS,
    space={},
    illegal=_illegal_naive,
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="nvfp4_quantize",
    language="triton",
    variant="tiled",
    summary="tiles of rows and blocks, 16-byte loads; whole rows for RMSNorm",
    archs=ARCHS,
    space=SPACE,
    illegal=_illegal_tiled,
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
