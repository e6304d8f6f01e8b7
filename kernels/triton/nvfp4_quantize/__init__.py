"""`nvfp4_quantize` in Triton: naive (a row a program), tiled (as much as keeps memory busy).

One kernel: everything from RMSNorm to the packed codes happens in registers.
"""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference._fp4 import block_of, scale_sizes
from kernelcat.reference.nvfp4_quantize import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.nvfp4_quantize.device:quantize"
ARCHS = ("sm_80+",)
LONGEST = 1 << 16
"""Elements of a program's row: Triton's limit leaves more, registers do not."""


def _row(problem: Problem) -> int:
    """A power of two that a row fits in, and scales of which are whole tiles."""
    return max(128, 1 << (problem["K"] - 1).bit_length())


def _program(problem: Problem, rows: int, cols: int, warps: int) -> Program:
    m, k = problem["M"], problem["K"]
    if m == 0 or k == 0:
        return Program(())
    padded_rows, padded_blocks = (size.of(problem.values) for size in scale_sizes("M"))
    grid = ceil(padded_rows / rows) * ceil(padded_blocks * block_of(problem.values) / cols)
    dtype = problem["dtype"]
    types = {
        "x": dtype, "global_scale": "float32", "weight": dtype, "signs": "float32",
        "seed": "int32", "q": "uint8", "scale": "uint8",
    }  # fmt: skip
    step = triton.step(
        KERNEL,
        (grid, 1, 1),
        {name: triton.pointer(name, kind) for name, kind in types.items()}
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
    """32 elements a thread, where a program can have so many."""
    return min(32, ceil(_row(problem) / 1024))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, 1, _row(problem), _naive_warps(problem))


def _reject_naive(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["K"] > LONGEST:
        return f"rows of more than {LONGEST} elements do not fit in a program"
    return None


def _cols(problem: Problem, config: Config) -> int:
    return _row(problem) if problem["rms_norm"] else config["cols"]


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], _cols(problem, config), config["warps"])


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, cols, warps = config["rows"], _cols(problem, config), config["warps"]
    if problem["K"] > LONGEST and problem["rms_norm"]:
        return f"rows of more than {LONGEST} elements do not fit in a program"
    if problem["rms_norm"] and config["cols"] != SPACE["cols"][0]:
        return "RMSNorm takes whole rows: one value of cols stands for all"
    per_thread, most = rows * cols // (32 * warps), 32 if problem["rms_norm"] else 64
    if not 8 <= per_thread <= most:
        return f"{per_thread} elements a thread: 8 fill one load, more than {most} the registers"
    if rows > 1 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


def _default_tiled(problem: Problem, gpu: Gpu) -> Config:
    """The best by the model; the first among equals."""
    serving = TILED.configs(problem, gpu)
    return min(serving, key=lambda c: _estimate(problem, c, gpu), default=SMALLEST)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time, longer where programs or a thread's elements are too few or too many."""
    m, k = problem["M"], problem["K"]
    rows = config.get("rows", 1)
    cols = _cols(problem, config) if "rows" in config else _row(problem)
    programs = max(1, ceil(m / rows) * ceil(k / cols))
    per_thread = rows * cols / (32 * config.get("warps", _naive_warps(problem)))
    held = min(1.0, per_thread / 16) * (1.0 if config.get("warps", 4) > 2 else 0.95)
    used = k / (ceil(k / cols) * cols) if k else 1.0
    busy = min(1.0, programs / gpu.sms) * (0.5 + 0.5 * held) * (0.5 + 0.5 * used)
    slow = 0.5 if problem["stochastic"] else 1.0
    return cost_model.copy_us(ENTRY.bytes_moved(problem), gpu, 0.85 * busy * slow)


SPACE = {"rows": (1, 4, 16), "cols": (128, 256, 512, 1024), "warps": (2, 4, 8, 16)}
SMALLEST = Config(rows=1, cols=512, warps=2)

NAIVE = Implementation(
    entry="nvfp4_quantize",
    language="triton",
    variant="naive",
    summary="a row a program",
    archs=ARCHS,
    space={},
    illegal=_reject_naive,
    default=lambda problem, gpu: Config(),
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
    illegal=_reject_tiled,
    default=_default_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"16-byte loads": "LDG*128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
