"""`nvfp4_matmul`'s CuTe kernels on the host (``cute_host``): cases in, verdicts out, as JSON."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import cute_host
import numpy as np
from cute_host import Mma, Value, Word, here, on, registers

from kernelcat import catalog, dtypes
from kernelcat.kernels.cute.nvfp4_matmul import naive, tiled
from kernelcat.verify import gate

ENTRY = catalog.entry("nvfp4_matmul")
HOST = SimpleNamespace(xp=np, synchronize=lambda: None)


def epilogue(write: Any) -> Any:
    """Stands in for ``Epilogue``: ``write`` gets each vector of the product."""
    return lambda *axes, **residual: SimpleNamespace(
        span=1,
        is_gated=False,
        bias=False,
        dtype="float32",
        activate=lambda z: z,
        store_vector=write,
    )


def run_naive(problem: Any, arrays: Any, d: np.ndarray) -> None:
    """Every element by itself."""
    naive.Epilogue = epilogue(None)
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))
    kernel = naive.Naive(
        problem["dtype"], "bfloat16", problem["format"] == "nvfp4", problem["packing"] == "tiles",
        False, "none",
    )  # fmt: skip
    a, w, scale, a_scale = (
        on(arrays[name], arrays[name].size) if name in arrays else None
        for name in ("a", "w", "w_scale", "a_block_scale")
    )
    if problem["dtype"] in ("bfloat16", "float16"):
        a = on(dtypes.decode(arrays["a"], problem["dtype"]), arrays["a"].size)
    for row, col in np.ndindex(m, n):
        factor = Value(arrays["global_scale"][0]) if kernel.nvfp4 else Value(1)
        factor = factor * arrays["a_scale"][row] if kernel.fp8 else factor
        d[row, col] = kernel.product(a, a_scale, w, scale, None, factor, row, col, k)


def run_tiled(problem: Any, arrays: Any, d: np.ndarray, block_m: int, block_n: int) -> None:
    """Tile after tile: a stage is loaded, then multiplied, by threads that are lanes."""
    m, n, k = (problem[axis] for axis in ("M", "N", "K"))

    def write(z: Any, bias: Any, residual: Any, out: Any, row: int, vector: int) -> None:
        d[row, 8 * vector : 8 * vector + 8] = z.load()

    tiled.Epilogue = epilogue(write)
    kernel = tiled.Tiled(
        problem["dtype"], "bfloat16", problem["format"] == "nvfp4", False, "none",
        block_m, block_n, 2, False,
    )  # fmt: skip
    pieces = k // (16 if kernel.fp8 else 8)
    scales = arrays["w_scale"].view("uint16") if kernel.nvfp4 else arrays["w_scale"]
    g = {
        "a": on(arrays["a"].view("uint32"), (4, pieces, m)),
        "w": on(arrays["w"].view("uint32"), (4, k // 32, n)),
        "scales": on(scales, (k // 32, n)),
        "factor": on(arrays.get("a_scale", np.ones(m, "float32")), m),
        "d": on(np.zeros(1, "float32"), (8, n // 8, m)),
    }
    s = {
        "w": registers((4, 4, block_n, 2), Word),
        "a": registers((4, kernel.a_pieces, block_m, 2), Word),
        "z": registers(kernel.result.pitch * block_m, Value),
    }
    s["z"] = cute_host.Tensor(s["z"].iterator, (block_n, block_m), (1, kernel.result.pitch))
    factor = Value(arrays["global_scale"][0] * tiled.LEFT if kernel.nvfp4 else 1)
    for row in range(0, m, block_m):
        for col in range(0, n, block_n):
            run_tile(kernel, g, s, factor, row, col, -(-k // tiled.BLOCK_K))


def run_tile(kernel: Any, g: Any, s: Any, factor: Any, row: int, col: int, k_tiles: int) -> None:
    warps = [Mma(kernel.dtype) for _ in range(kernel.threads // 32)]
    everyone, failures = threading.Barrier(kernel.threads), []

    def thread(tidx: int) -> None:
        here.lane, mma = tidx % 32, warps[tidx // 32]
        own_n, own_m = tidx // 32 % 4 * kernel.warp_n, tidx // 128 * kernel.warp_m
        acc = registers(mma.partition_shape_C((kernel.warp_n, kernel.warp_m)), Value)
        scales = registers((2, kernel.warp_n // 16), kernel.scale_type)
        for k_idx in range(k_tiles):
            stage = k_idx % 2
            kernel.load(g["a"], g["w"], s["a"], s["w"], row, col, k_idx, stage, tidx)
            everyone.wait()
            kernel.load_scales(g["scales"], scales, col + own_n, k_idx)
            at = (None, None, None, stage)
            kernel.multiply(mma, acc, scales, s["w"][at], s["a"][at], own_n, own_m)
        kernel.result.place(acc, s["z"], own_n, own_m)
        everyone.wait()
        kernel.result.store(s["z"], g["factor"], None, g["d"], factor, row, col, tidx)

    def guarded(tidx: int) -> None:
        try:
            thread(tidx)
        except Exception as error:
            failures.append(error)
            for barrier in (everyone, *(mma.barrier for mma in warps)):
                barrier.abort()

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(kernel.threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    told = [e for e in failures if not isinstance(e, threading.BrokenBarrierError)]
    if failures:
        raise (told or failures)[0]


def judge(tile: list[int], axes: dict[str, Any]) -> list[Any]:
    problem = ENTRY.problem(**axes)
    prepared = gate.prepare(ENTRY, problem, HOST, 3)
    d = np.full((problem["M"], problem["N"]), np.nan, "float32")
    if tile:
        run_tiled(problem, prepared.arrays, d, *tile)
    else:
        run_naive(problem, prepared.arrays, d)

    def write(arrays: Any) -> Any:
        kind = ENTRY.outputs[0].dtype_of(problem)
        return lambda: arrays["d"].__setitem__(..., dtypes.encode(d, kind))

    verdict = prepared.verify(write)
    return [verdict.passed, verdict.detail, verdict.max_error]


print(json.dumps({name: judge(*case) for name, case in json.load(sys.stdin).items()}))
