"""`moe_gemm`'s CuTe kernels on the host (``cute_threads``): cases in, verdicts out, as JSON.

Of the kernel on tensor cores everything runs but its pipeline: tiles are found, operands copied,
and sums stored by the kernel's own source, and NumPy multiplies what lies in shared memory.
"""

from __future__ import annotations

import itertools
import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import cute_threads
import numpy as np
from cute_host import STORAGE, Pointer, Tensor, Value, cute, here, on, registers

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config, Float32, Program
from kernelcat.catalog.implementation import Pointer as PointerParam
from kernelcat.kernels.cute import moe_gemm, moe_mlp
from kernelcat.kernels.cute.moe_gemm.hopper import WGMMA
from kernelcat.kernels.cute.moe_gemm.wgmma import ROW_BYTES, Wgmma
from kernelcat.kernels.cute.moe_route import naive as route
from kernelcat.kernels.cute.moe_route import naive_place
from kernelcat.reference._experts import FP8
from kernelcat.runtime import gpu
from kernelcat.verify import gate

NAIVE = {"moe_gemm": moe_gemm.NAIVE, "moe_mlp": moe_mlp.naive.IMPLEMENTATION}
HOST = SimpleNamespace(xp=np, gpu=gpu.find("h200"), synchronize=lambda: None)
LANES, WARPGROUP = 32, 128
SIXTEEN_BITS = ("bfloat16", "float16")

route.THREADS = naive_place.THREADS = LANES  # threads take long here
cute.arch.thread_idx = lambda: (here.tidx % width(), here.tidx // width(), 0)
cute.arch.barrier = lambda **_: cute_threads.barrier()
cute.arch.fmin = lambda x, y, nan=False: Value((np.minimum if nan else np.fmin)(x, y))
cute.arch.fmax = lambda x, y, nan=False: Value((np.maximum if nan else np.fmax)(x, y))
cute.math.exp = lambda x, fastmath: Value(np.exp(np.float32(x)))


def width() -> int:
    """Threads of the thread block along x."""
    return getattr(here, "width", 1024)


def be(thread: int, block: Any = (0, 0), block_width: int = 1024, num_blocks: int = 1) -> None:
    """Make this the thread ``thread`` of a thread block, for code in which no threads meet."""
    here.tidx, here.lane, here.width = thread, thread % LANES, block_width
    here.block = SimpleNamespace(index=(*block, 0), grid=(num_blocks, 1, 1))


def run_threads(function: Any, num_threads: int) -> None:
    """Run ``function`` in every thread of a thread block."""
    cute_threads.Launch(function, ()).launch(grid=(1, 1, 1), block=(num_threads, 1, 1))


def bits(array: np.ndarray) -> np.ndarray:
    """The elements of an array as unsigned integers, sharing its memory."""
    return array.view(f"uint{8 * array.itemsize}")


class Arrays:
    """The arrays of a problem, as tensors."""

    def __init__(self, problem: Any, arrays: Any) -> None:
        self.problem, self.arrays = problem, arrays

    def values(self, name: str, element: str = "") -> np.ndarray:
        """A tensor's memory; 16-bit elements are decoded, and an absent tensor is empty."""
        array = self.arrays.get(name, np.zeros(0, "float32"))
        return dtypes.decode(array, element) if element in SIXTEEN_BITS else array

    def tensor(self, name: str, element: str = "", shape: Any = None, stride: Any = None) -> Tensor:
        array = self.values(name, element)
        return on(array, array.size if shape is None else shape, stride)


# ---- launches ------------------------------------------------------------------------------------


def launch(self: Any, grid: Any, block: Any, **more: Any) -> None:
    """Launch a kernel. In those of `moe_gemm` no threads meet, so one runs after the other."""
    if ".moe_gemm." not in self.kernel.__module__:
        launch_threads(self, grid, block, **more)
        return
    for index in itertools.product(*map(range, grid)):
        for thread in range(block[0] * block[1]):
            be(thread, index[:2], block[0])
            self.kernel(*self.args)
    be(0)


launch_threads, cute_threads.Launch.launch = cute_threads.Launch.launch, launch


def run(program: Program, arrays: Any, given: Any = None) -> None:
    """All launches of a program; 16-bit elements are float32 in between.

    ``given`` are workspaces (name -> array) that another launch has filled.
    """
    kinds = {
        param.tensor: kind[1:]
        for step in program.steps
        for param, kind in zip(step.params, step.source.params, strict=True)
        if isinstance(param, PointerParam)
    }
    memory = dict(given or {})
    for name, kind in kinds.items():
        size, is_narrow = program.workspaces.get(name, 0), kind in SIXTEEN_BITS
        if name in ("d", "out"):
            memory[name] = np.full(arrays[name].size, np.nan, "float32")
        elif name in arrays:
            memory[name] = dtypes.decode(arrays[name], kind) if is_narrow else arrays[name]
        elif size and name not in memory:
            element = "float32" if is_narrow else kind
            memory[name] = np.zeros(size // dtypes.itemsize(kind), element)

    def value(param: Any) -> Any:
        if isinstance(param, PointerParam):
            return Pointer(memory.get(param.tensor, np.zeros(0, "float32")).reshape(-1))
        return Value(param.value) if isinstance(param, Float32) else param.value

    narrow = {kind: STORAGE[kind] for kind in SIXTEEN_BITS}
    STORAGE.update(dict.fromkeys(SIXTEEN_BITS, "float32"))
    for step in program.steps:
        module = import_module(step.source.module)
        kernel = getattr(module, step.source.builder)(**dict(step.source.constants))
        kernel(*map(value, step.params), stream=None)
    STORAGE.update(narrow)
    for name in memory.keys() & {"d", "out"}:
        arrays[name][...] = dtypes.encode(memory[name].reshape(arrays[name].shape), kinds[name])


# ---- tensor cores --------------------------------------------------------------------------------


class Tiles:
    """A problem's tiles, one after the other, each with all of its threads."""

    def __init__(self, problem: Any, given: Arrays, tile: str, out: np.ndarray) -> None:
        (step, *_) = WGMMA.program(problem, Config(tile=tile, stages=4), HOST.gpu).steps
        self.kernel = Wgmma(**dict(step.source.constants))
        self.rows, self.a_rows, self.top_k, self.experts, self.n, self.k, self.pitch, _ = (
            param.value for param in step.params[8:]
        )
        self.problem, self.given, element = problem, given, problem["act_dtype"]
        self.operand = dict.fromkeys(SIXTEEN_BITS, "uint16").get(element, "uint8")
        columns = ROW_BYTES // np.dtype(self.operand).itemsize
        self.num_k_blocks = -(-self.k // columns)
        self.offsets, self.order = given.tensor("offsets"), given.tensor("order")
        self.a = on(bits(given.arrays["a"]), self.kernel.gathered.layout(self.a_rows, self.k))
        self.bias = given.tensor("bias", problem["dtype"], (self.n, self.experts), (1, self.n))
        self.out = Tensor(
            Pointer(out.reshape(-1)), self.kernel.result.layout(self.rows, self.pitch)
        )

    def run(self, num_ctas: int) -> None:
        """Everything, by ``num_ctas`` thread blocks."""
        tiles, lists = self.kernel.tiles, self.kernel.max_experts + 1
        offsets, blocks = registers(lists, int), registers(lists, int)
        run_threads(lambda: tiles.load(self.offsets, offsets, blocks, LANES), LANES)
        num_n = -(-self.n // self.kernel.block_n)
        for cta in range(num_ctas):
            expert = 0
            if not self.kernel.result.is_partial:
                self.clear(cta, num_ctas)
            for index in range(cta, blocks[self.experts] * num_n, num_ctas):
                found: list[tuple[int, ...]] = []
                at = (index, expert, offsets, blocks, self.experts, num_n)
                run_threads(lambda at=at, found=found: found.append(tiles.find(*at)), LANES)
                assert len(set(found)) == 1
                expert = int(found[0][0])
                self.multiply(*map(int, found[0]))

    def clear(self, cta: int, num_ctas: int) -> None:
        threads = WARPGROUP * self.kernel.num_consumers
        for thread in range(threads):
            be(thread, (cta, 0), num_blocks=num_ctas)
            self.kernel.result.clear(self.out, self.offsets[self.experts], threads)

    def multiply(self, expert: int, row: int, num_rows: int, col: int) -> None:
        """One tile: its stages, the products, and the epilogue."""
        block_m, block_n = self.kernel.block_m, self.kernel.block_n
        z = np.zeros((block_m, block_n), np.float32)
        w = self.given.arrays["w"].reshape(-1, self.k)[expert * self.n + col :][:block_n]
        w = np.pad(w, ((0, block_n - len(w)), (0, 0)))
        scales = self.scales_of(expert, row, num_rows, col)
        for k_idx, a in enumerate(self.stages_of(row, num_rows)):
            columns = slice(k_idx * a.shape[1], (k_idx + 1) * a.shape[1])
            part = dtypes.decode(w[:, columns], self.problem["act_dtype"])
            with np.errstate(invalid="ignore"):
                z += a[:, : part.shape[1]] @ part.T * scales(k_idx)
        for first_row in range(0, block_m, self.kernel.rows):
            if first_row < num_rows:
                self.store(z[first_row:], expert, first_row, row, num_rows, col)

    def stages_of(self, row: int, num_rows: int) -> Any:
        """A's part of each stage, decoded, (block_m, columns)."""
        element, block_m = self.problem["act_dtype"], self.kernel.block_m
        if not self.problem["gather"]:
            a = self.given.arrays["a"][row : row + block_m]
            a = np.pad(a, ((0, block_m - len(a)), (0, -a.shape[1] % ROW_BYTES)))
            columns = ROW_BYTES // a.itemsize
            for k_idx in range(self.num_k_blocks):
                yield dtypes.decode(a[:, k_idx * columns : (k_idx + 1) * columns], element)
            return
        gathered = self.kernel.gathered
        memory = np.full(4 * block_m * ROW_BYTES, 0xFF, np.uint8).view(self.operand)  # NaN
        stages, rows = gathered.shared_vectors(Pointer(memory)), []
        for thread in range(WARPGROUP):
            be(thread)
            rows.append(registers(gathered.num_passes, int))
            gathered.find(rows[-1], self.order, self.top_k, row, num_rows)
        for k_idx in range(self.num_k_blocks):
            for thread in range(WARPGROUP):
                be(thread)
                stage = stages[None, None, None, k_idx % 4]
                gathered.copy(self.a, rows[thread], num_rows, k_idx, stage)
            yield self.unswizzled(memory.reshape(4, block_m, -1)[k_idx % 4])

    def unswizzled(self, stage: np.ndarray) -> np.ndarray:
        """Vectors of 16 bytes of row r are in the order c ^ (r % 8)."""
        vectors = stage.reshape(len(stage), 8, -1)
        ordered = [row[np.arange(8) ^ (r % 8)] for r, row in enumerate(vectors)]
        array = np.stack(ordered).reshape(len(stage), -1)
        element = self.problem["act_dtype"]
        return dtypes.decode(array.view(dtypes.STORAGE[element]), element)

    def scales_of(self, expert: int, row: int, num_rows: int, col: int) -> Any:
        """A function from a k-block to the factors of its products."""
        if self.problem["act_dtype"] != FP8:
            return lambda k_idx: np.float32(1)
        scales, blocks_n = self.kernel.scales, -(-self.n // 128)
        shape = (1, self.a_rows, self.num_k_blocks)
        a_scale = self.given.tensor("a_scale", "float32", shape, (1, 1, self.a_rows))
        shape = (1, blocks_n, self.num_k_blocks, self.experts)
        stride = (1, self.num_k_blocks, 1, blocks_n * self.num_k_blocks)
        w_scale = self.given.tensor("w_scale", "float32", shape, stride)

        def factors(k_idx: int) -> np.ndarray:
            sA = registers((1, self.kernel.block_m), Value)
            sW = registers((1, self.kernel.num_groups), Value)
            for thread in range(WARPGROUP):
                be(thread)
                rows = registers(scales.count, int)
                scales.find(rows, self.order, self.top_k, row, num_rows)
                at = (None, None, k_idx)
                scales.copy(a_scale[at], w_scale[(*at, expert)], rows, col, sA, sW)
            return sA.load()[:, None] * sW.load().repeat(self.kernel.group_rows)[None, :]

        return factors

    def store(
        self, z: np.ndarray, expert: int, first_row: int, row: int, num_rows: int, col: int
    ) -> None:
        """The epilogue of a consumer, whose rows of the product are the first ones of ``z``."""
        result, block_n = self.kernel.result, self.kernel.block_n
        shared = registers((2, block_n // 2), Value)

        def epilogue() -> None:
            values = registers(result.bias_count, Value)
            result.load_bias(self.bias, expert, col, values)
            result.share_bias(values, shared, 1)
            for i in range(self.kernel.rows // 64):
                sums = fragment(z[64 * i : 64 * i + 64], here.tidx)
                at = first_row + i * 64, row, num_rows, col
                result.store(sums, shared, self.out, *at)

        run_threads(epilogue, WARPGROUP)


def fragment(z: np.ndarray, thread: int) -> Tensor:
    """A thread's sums of 64 rows, by PTX's table of wgmma's accumulators: (2, 2, columns / 8)."""
    warp, lane = thread % WARPGROUP // 32, thread % 32
    rows = warp * 16 + lane // 4 + np.array([0, 8])
    octets = z[rows].reshape(2, -1, 8)[:, :, lane % 4 * 2 : lane % 4 * 2 + 2]
    return on(octets.transpose(1, 0, 2), 2 * octets.shape[1] * 2)


def run_wgmma(problem: Any, arrays: Any, tile: str) -> None:
    config = Config(tile=tile, stages=4)
    assert WGMMA.why_not(config, problem, HOST.gpu) is None
    d, given = arrays["d"], Arrays(problem, arrays)
    if not problem["combine"]:
        Tiles(problem, given, tile, d).run(2)
        return
    pitch = -(-d.shape[1] // 8) * 8
    partial = np.full((problem["tokens"] * problem["top_k"], pitch), np.nan, np.float32)
    Tiles(problem, given, tile, partial).run(2)
    _, total = WGMMA.program(problem, config, HOST.gpu).steps
    run(Program((total,)), arrays, {"partial_rows": partial})


# ---- verdicts ------------------------------------------------------------------------------------


def judge(tile: str, name: str, axes: dict[str, Any]) -> list[Any]:
    """The gate's verdict on the tensor cores with ``tile``, or without one on the baseline."""
    entry = catalog.entry(name)
    problem = entry.problem(**axes)
    prepared = gate.prepare(entry, problem, HOST, 3)
    naive = NAIVE[name]
    assert naive.why_not(Config(), problem, HOST.gpu) is None

    def write(arrays: Any) -> Any:
        if tile:
            return lambda: run_wgmma(problem, arrays, tile)
        return lambda: run(naive.program(problem, Config(), HOST.gpu), arrays)

    verdict = prepared.verify(write)
    return [verdict.passed, verdict.detail, verdict.max_error]


print(json.dumps({name: judge(*case) for name, case in json.load(sys.stdin).items()}))
