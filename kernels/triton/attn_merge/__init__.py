"""`attn_merge` in Triton: one row a program (naive), or a tile of rows a program (tiled)."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.reference.attn_merge import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.attn_merge.device:merge"


def _num_rows(problem: Problem) -> int:
    """Rows of out: query tokens times heads."""
    return int(problem["tokens"] * problem["heads"])


def _program(problem: Problem, rows: int, warps: int) -> Program:
    """One launch with ``rows`` rows a program."""
    num_rows = _num_rows(problem)
    if num_rows == 0:
        return Program(())
    pointers = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    integers = {
        "parts": triton.integer(problem["parts"], divisor=1),
        "num_rows": triton.integer(num_rows, divisor=1),
    }
    step = triton.step(
        KERNEL,
        (ceil(num_rows / rows), 1, 1),
        pointers | integers,
        {"HEAD_DIM": problem["head_dim"], "ROWS": rows},
        num_warps=warps,
    )
    return Program((step,))


def _naive(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, rows=1, warps=1)


def _tiled(problem: Problem, config: Config, gpu: Gpu) -> Program:
    return _program(problem, config["rows"], config["warps"])


def _illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_rows(problem) >= 1 << 31:
        return f"{_num_rows(problem)} rows are more than 32-bit indices reach"
    return None


def _unpromising_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    elements = config["rows"] * problem["head_dim"] / (32 * config["warps"])
    if not 4 <= elements <= 64:
        return f"{elements:g} elements a thread: 4 to 64 fill its loads and fit in its registers"
    return None


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Memory time, longer where threads load few elements or programs are fewer than SMs."""
    rows, warps = config.get("rows", 1), config.get("warps", 1)
    num_programs = ceil(_num_rows(problem) / rows)
    in_flight = min(1.0, 0.3 + rows * problem["head_dim"] / (32 * warps) / 24)
    busy = min(1.0, max(num_programs, 1) / gpu.sms)
    return cost_model.copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * in_flight * busy)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Implementation(
        entry="attn_merge",
        language="triton",
        variant="naive",
        summary="one row a program; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_illegal,
        program=_naive,
        estimate=_estimate,
        rank=0,
    ),
    Implementation(
        entry="attn_merge",
        language="triton",
        variant="tiled",
        summary="many rows a program, 16-byte loads",
        archs=("sm_80+",),
        space={"rows": (4, 8, 16, 32), "warps": (1, 2, 4, 8)},
        illegal=_illegal,
        unpromising=_unpromising_tiled,
        program=_tiled,
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128"},
        rank=1,
    ),
)
