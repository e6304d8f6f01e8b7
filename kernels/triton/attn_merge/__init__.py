"""`attn_merge` in Triton: a row a program, or as many as fill the machine."""

from math import ceil

from kernelcat.catalog import cost_model
from kernelcat.catalog.implementation import Config, Implementation, Program
from kernelcat.catalog.spec import Problem
from kernelcat.jit import triton
from kernelcat.kernels.triton.gemm.variants import implementation
from kernelcat.reference.attn_merge import ENTRY
from kernelcat.runtime.gpu import Gpu

KERNEL = "kernelcat.kernels.triton.attn_merge.device:merge"


def _launch(problem: Problem, rows: int, warps: int) -> Program:
    num_rows = problem["tokens"] * problem["heads"]
    if num_rows == 0:
        return Program(())
    arguments = {
        tensor.name: triton.pointer(tensor.name, tensor.dtype_of(problem))
        for tensor in ENTRY.tensors
    }
    numbers = {
        "parts": triton.integer(problem["parts"], divisor=1),
        "num_rows": triton.integer(num_rows, divisor=1),
    }
    step = triton.step(
        KERNEL,
        (ceil(num_rows / rows), 1, 1),
        arguments | numbers,
        {"HEAD_DIM": problem["head_dim"], "ROWS": rows},
        num_warps=warps,
    )
    return Program((step,))


def _reject(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if problem["tokens"] * problem["heads"] >= 1 << 31:
        return "more rows than 32-bit indices reach"
    return None


def _reject_tiled(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    elements = config["rows"] * problem["head_dim"] / (32 * config["warps"])
    if not 4 <= elements <= 64:
        return f"{elements:g} elements a thread: too few, or too many for registers"
    return _reject(config, problem, gpu)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    rows, warps = config.get("rows", 1), config.get("warps", 1)
    programs = ceil(problem["tokens"] * problem["heads"] / rows)
    in_flight = min(1.0, 0.3 + rows * problem["head_dim"] / (32 * warps) / 24)
    busy = min(1.0, max(programs, 1) / gpu.sms)
    return cost_model.copy_us(ENTRY.bytes_moved(problem), gpu, 0.9 * in_flight * busy)


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    implementation(
        entry="attn_merge",
        variant="naive",
        summary="a row a program; any shape",
        archs=("sm_80+",),
        space={},
        illegal=_reject,
        program=lambda problem, config, gpu: _launch(problem, 1, 1),
        estimate=_estimate,
        rank=0,
    ),
    implementation(
        entry="attn_merge",
        variant="tiled",
        summary="many rows a program, 16-byte loads",
        archs=("sm_80+",),
        space={"rows": (4, 8, 16, 32), "warps": (1, 2, 4, 8)},
        illegal=_reject_tiled,
        program=lambda problem, config, gpu: _launch(problem, config["rows"], config["warps"]),
        estimate=_estimate,
        techniques={"16-byte loads": "LDG*128"},
        rank=1,
    ),
)
