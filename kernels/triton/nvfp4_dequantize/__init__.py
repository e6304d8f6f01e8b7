"""`nvfp4_dequantize` in Triton: naive (128 elements a program), tiled (tiles, wide stores)."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.nvfp4_dequantize import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.nvfp4_dequantize.device:dequantize"
ARCHS = ("sm_80+",)
NAIVE_COLS = 128
INSTRUCTIONS = {
    ("nvfp4", "linear"): 21, ("mxfp4", "linear"): 18, ("nvfp4", "swizzled"): 23.5,
    ("mxfp4", "swizzled"): 20.5,
}  # fmt: skip
"""Instructions of a thread for an element: NVFP4 has twice as many scales."""


def _program(problem: Problem, rows: int, cols: int, warps: int) -> Program:
    m, k = problem["M"], problem["K"]
    if m == 0 or k == 0:
        return Program(())
    types = {
        "q": "uint8", "scale": "uint8", "global_scale": "float32", "x": problem["dtype"],
    }  # fmt: skip
    step = triton.step(
        KERNEL,
        (ceil(m / rows) * ceil(k / cols), 1, 1),
        {name: triton.pointer(name, dtype) for name, dtype in types.items()}
        | {"M": triton.integer(m, divisor=1), "K": triton.integer(k)},
        {
            "NVFP4": problem["format"] == "nvfp4",
            "SWIZZLED": problem["scale_layout"] == "swizzled",
            "ROWS": rows,
            "COLS": cols,
        },
        num_warps=warps,
    )
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, 1, NAIVE_COLS, 1)


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], config["cols"], config["warps"])


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    rows, per_thread = config["rows"], config["rows"] * config["cols"] // (32 * config["warps"])
    if not 8 <= per_thread <= 64:
        return f"{per_thread} elements a thread: 8 fill one store, more than 64 the registers"
    if rows > 1 and rows >= 2 * problem["M"]:
        return f"programs of {rows} rows are at least half empty for M={problem['M']}"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory or instructions, those for masked columns included; warps start one at a time."""
    m, k = problem["M"], problem["K"]
    rows, cols, warps = (config.get(n, d) for n, d in (("rows", 1), ("cols", 128), ("warps", 1)))
    programs, per_thread = max(1, ceil(m / rows) * ceil(k / cols)), rows * cols / (32 * warps)
    elements = ceil(m / rows) * rows * ceil(k / cols) * cols
    instructions = INSTRUCTIONS[problem["format"], problem["scale_layout"]] * elements
    resident = max(1, min(32, 64 // warps, int(65536 / (32 * warps * (24 + 2 * per_thread)))))
    return cost_model.stream_us(
        ENTRY.bytes_moved(problem), gpu, blocks=programs, rounds=programs / (gpu.sms * resident),
        instructions=instructions, waits_us=0.1,
    )  # fmt: skip


NAIVE = Implementation(
    entry="nvfp4_dequantize",
    language="triton",
    variant="naive",
    summary=f"{NAIVE_COLS} elements of a row a program, which has one warp",
    archs=ARCHS,
    space={},
    program=_naive,
    estimate=_estimate,
    rank=0,
)

TILED = Implementation(
    entry="nvfp4_dequantize",
    language="triton",
    variant="tiled",
    summary="tiles of rows and blocks, 16-byte stores",
    archs=ARCHS,
    space={"rows": (1, 4, 16), "cols": (128, 256, 512, 1024), "warps": (2, 4, 8)},
    unpromising=_unpromising_tiled,
    program=_tiled,
    estimate=_estimate,
    techniques={"16-byte stores": "STG*128"},
    rank=1,
)

IMPLEMENTATIONS = (NAIVE, TILED)
