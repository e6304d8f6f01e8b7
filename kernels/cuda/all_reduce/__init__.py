"""`all_reduce` in CUDA C++: ll (flags beside the data), one_shot and two_shot (tiles, signals), and
slots (words that are their own flags; residual and RMSNorm).

Ranks write to each other's windows (``kernelcat/window.cuh``) and never read them. NVLink multicast
is not used.
"""

from __future__ import annotations

from math import ceil

from kernelcat.catalog.cost_model import LAUNCH_US, copy_us
from kernelcat.catalog.implementation import (
    Config,
    Float32,
    Implementation,
    Int32,
    Int64,
    Param,
    Pointer,
    Program,
    Step,
)
from kernelcat.catalog.spec import Problem
from kernelcat.kernels.cuda.common.dependent_launch import has_dependent_launch
from kernelcat.kernels.cuda.common.launch import instance
from kernelcat.kernels.cuda.common.windows import (
    HALF_BYTES,
    RING_TILES,
    TRIP_US,
    why_not_resident,
    window_params,
    wire_us,
)
from kernelcat.runtime.gpu import Gpu

LL_ELEMENTS = 1 << 19
"""Elements of x that the flagged words of a window hold: 1 MiB."""
LL_WORD, VECTOR = 4, 8
"""Elements in a flagged word, and in 16 bytes."""
THREADS = 512
"""Threads of a thread block of one_shot and two_shot."""

LL_SPACE = {"threads": (128, 256, 512), "blocks": (8, 32, 128)}
SLOT_THREADS, MAX_SLOT_HIDDEN = 256, 16384
"""Threads of a thread block of slots, and elements of the longest row."""
SLOT_SPACE = {"blocks": (64, 128, 256)}
TILE_SPACE = {"unroll": (1, 2, 4), "blocks": (16, 32, 64, 128, 256)}
"""unroll : vectors of a tile for each thread; blocks : thread blocks at most"""


def _num_elements(problem: Problem) -> int:
    return int(problem["tokens"] * problem["hidden"])


def _launch(
    problem: Problem, kernel: str, threads: int, num_blocks: int, size: Param, gpu: Gpu, *more: int
) -> Program:
    """A launch; ``more`` follow type, ranks and threads among the template arguments."""
    if _num_elements(problem) == 0:
        return Program(())
    programmatic = has_dependent_launch(gpu)
    source = instance(
        f"all_reduce/{kernel}.cu",
        f"all_reduce_{kernel}",
        *(problem["dtype"], problem["ranks"], threads, *more, programmatic),
    )
    params = (Pointer("x"), Pointer("out"), size, *window_params())
    step = Step(source, (num_blocks, 1, 1), params, threads,
                programmatic=programmatic, max_carveout=True)  # fmt: skip
    return Program((step,))


def _ll(problem: Problem, config: Config, gpu: Gpu) -> Program:
    threads, size = config["threads"], _num_elements(problem)
    num_blocks = min(ceil(size / (LL_WORD * threads)), config["blocks"])
    return _launch(problem, "ll", threads, num_blocks, Int32(size), gpu)


def _tile_elements(config: Config) -> int:
    return int(THREADS * config["unroll"] * VECTOR)


def _one_shot(problem: Problem, config: Config, gpu: Gpu) -> Program:
    size = _num_elements(problem)
    num_blocks = min(ceil(size / _tile_elements(config)), config["blocks"])
    return _launch(problem, "one_shot", THREADS, num_blocks, Int64(size), gpu, config["unroll"])


def _two_shot(problem: Problem, config: Config, gpu: Gpu) -> Program:
    size = _num_elements(problem)
    num_blocks = min(ceil(size / (problem["ranks"] * _tile_elements(config))), config["blocks"])
    return _launch(problem, "two_shot", THREADS, num_blocks, Int64(size), gpu, config["unroll"])


def _row_vectors(problem: Problem) -> int:
    """Vectors of 16 bytes of a row that a thread of slots has at most."""
    return max(ceil(problem["hidden"] / (VECTOR * SLOT_THREADS)), 1)


def _slots(problem: Problem, config: Config, gpu: Gpu) -> Program:
    if _num_elements(problem) == 0:
        return Program(())
    programmatic = has_dependent_launch(gpu)
    source = instance(
        "all_reduce/slots.cu", "all_reduce_slots", problem["dtype"], problem["ranks"], SLOT_THREADS,
        _row_vectors(problem), problem["norm"], programmatic,
    )  # fmt: skip
    tensors = map(Pointer, ("x", "residual", "weight", "out", "normed"))
    sizes = (Int32(problem["tokens"]), Int32(problem["hidden"]), Float32(problem["eps"]))
    num_blocks = min(problem["tokens"], config["blocks"])
    step = Step(source, (num_blocks, 1, 1), (*tensors, *sizes, *window_params()), SLOT_THREADS,
                4 * (SLOT_THREADS // 32), programmatic=programmatic, max_carveout=True)  # fmt: skip
    return Program((step,))


def _slots_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    hidden, slots = problem["hidden"], 2 * problem["ranks"] * _num_elements(problem)
    if hidden % VECTOR or hidden > MAX_SLOT_HIDDEN:
        return f"hidden must be a multiple of {VECTOR}, and at most {MAX_SLOT_HIDDEN}"
    if slots > HALF_BYTES:
        return f"slots of {slots} bytes do not fit into a window"
    return why_not_resident(config["blocks"], gpu)


def _why_not_alone(problem: Problem) -> str | None:
    if problem["residual"] or problem["norm"]:
        return "residual and norm are for slots"
    return None


def _why_not_vectors(problem: Problem) -> str | None:
    if _num_elements(problem) % VECTOR:
        return f"tokens * hidden must be a multiple of the {VECTOR} elements in 16 bytes"
    return None


def _ll_illegal(config: Config, problem: Problem, gpu: Gpu) -> str | None:
    if _num_elements(problem) > LL_ELEMENTS:
        return f"a window holds {LL_ELEMENTS} elements with flags, not {_num_elements(problem)}"
    reason = _why_not_alone(problem) or _why_not_vectors(problem)
    return reason or why_not_resident(config["blocks"], gpu)


def _tiles_illegal(config: Config, problem: Problem, gpu: Gpu, rounds: int) -> str | None:
    rings = config["blocks"] * problem["ranks"] * rounds
    if rings * RING_TILES * _tile_elements(config) * 2 > HALF_BYTES:
        return f"{rings} rings of tiles do not fit into a window: fewer blocks or smaller unroll"
    reason = _why_not_alone(problem) or _why_not_vectors(problem)
    return reason or why_not_resident(config["blocks"], gpu)


def _exchange_us(problem: Problem, config: Config, gpu: Gpu, sent: float, trips: int) -> float:
    """The longer of the wire and of the local memory, and trips. ``sent`` counts sizes of x."""
    size = 2 * _num_elements(problem)
    wire = wire_us(sent * size, config["blocks"])
    return LAUNCH_US + max(wire, copy_us(2 * size, gpu)) + trips * TRIP_US


def _ll_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    words = _num_elements(problem) / LL_WORD / (config["threads"] * config["blocks"])
    sent = 2 * (problem["ranks"] - 1)
    return _exchange_us(problem, config, gpu, sent, 1) + 0.5 * max(words - 1, 0) * TRIP_US


def _one_shot_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    return _exchange_us(problem, config, gpu, problem["ranks"] - 1, 2) - 0.1 * config["unroll"]


def _two_shot_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    sent = 2 * (problem["ranks"] - 1) / problem["ranks"]
    return _exchange_us(problem, config, gpu, sent, 4) - 0.1 * config["unroll"]


def _slots_us(problem: Problem, config: Config, gpu: Gpu) -> float:
    blocks = min(config["blocks"], max(problem["tokens"], 1))
    config = Config(blocks=blocks)
    return _exchange_us(problem, config, gpu, problem["ranks"] - 1, 1)


SIGNALS = {
    "system-scope release": "STG.E.64.STRONG.SYS",
    "system-scope acquire": "LDG.E.64.STRONG.SYS",
}

IMPLEMENTATIONS = (
    Implementation(
        entry="all_reduce",
        language="cuda",
        variant="one_shot",
        summary="every rank sends all of x to every peer in tiles, with a signal for each tile",
        archs=("sm_80+",),
        space=TILE_SPACE,
        illegal=lambda config, problem, gpu: _tiles_illegal(config, problem, gpu, 1),
        program=_one_shot,
        estimate=_one_shot_us,
        techniques=SIGNALS,
        rank=0,
    ),
    Implementation(
        entry="all_reduce",
        language="cuda",
        variant="two_shot",
        summary="reduce-scatter and all-gather in one kernel, in tiles whose trips overlap",
        archs=("sm_80+",),
        space=TILE_SPACE,
        illegal=lambda config, problem, gpu: _tiles_illegal(config, problem, gpu, 2),
        program=_two_shot,
        estimate=_two_shot_us,
        techniques=SIGNALS,
        rank=1,
    ),
    Implementation(
        entry="all_reduce",
        language="cuda",
        variant="ll",
        summary="low latency: a flag beside each 4 bytes of data, at most 1 MiB",
        archs=("sm_80+",),
        space=LL_SPACE,
        illegal=_ll_illegal,
        program=_ll,
        estimate=_ll_us,
        techniques={"flags beside data": "STG*128.STRONG.SYS"},
        rank=2,
    ),
    Implementation(
        entry="all_reduce",
        language="cuda",
        variant="slots",
        summary="a slot for each row, whose words are their own flags; residual and RMSNorm",
        archs=("sm_80+",),
        space=SLOT_SPACE,
        illegal=_slots_illegal,
        program=_slots,
        estimate=_slots_us,
        techniques={"words that arrive": "STG*128.STRONG.SYS"},
        rank=3,
    ),
)
