"""Host time of a call: ``python tests/host_cost.py [--dry] [--json]``.

Measures microseconds of host time for a call of one small gemm kernel: by the raw launcher, by
``bind()``, by ``op(a, b, out=d)`` and by ``op(a, b)``; and of launches by torch and cuda.core. The
ways to call take turns in short blocks, in random order, so that the state of the machine is the
same for all. Times are medians over the blocks, and differences are medians of the differences in
each block. The GPU is idle before each block, so no block waits for the GPU: the launch queue never
fills.

The project has four limits: ``op(..., out=)`` may take 3 us more than the raw launcher, 5 us
while calls are recorded, and ``bind()`` 1 us more; and the torch operator 3 us more than torch.mm.
The exit status is 1 if a limit is exceeded. Dry, the torch operator is compared with ``op(a, b)``.

``--dry`` needs no GPU: a launcher that does nothing replaces the real one, and CPU tensors replace
CUDA tensors. A dry run measures the Python code only; its times are not those of a GPU machine.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import sub
from types import SimpleNamespace
from typing import Any

import torch

import kernelcat
from kernelcat import catalog
from kernelcat.call import arrays, operator, registry, torch_operators
from kernelcat.runtime import driver, gpu, launcher

SHAPE = (128, 128, 128)
CALLS = 200
"""Calls in a block: so few that the launch queue (1024 launches) never fills."""

RECORDED = "op(a, b, out=d), recorded"
RAW = "launcher(pointers, stream)"
TORCH, MM, OP = "torch.ops.kernelcat.gemm", "torch.mm(a, b)", "op(a, b)"
LIMITS_US = {
    ("op(a, b, out=d)", RAW): 3.0,
    (RECORDED, RAW): 5.0,
    ("bind()()", RAW): 1.0,
    (TORCH, MM): 3.0,
}
"""(way, another way) -> microseconds that the first may take more."""
DRY_LIMITS_US = {**{k: us for k, us in LIMITS_US.items() if k[1] == RAW}, (TORCH, OP): 4.0}

LIBRARY = torch.library.Library("kernelcat", "IMPL")
"""Kernels that a dry run registers; they live as long as this object."""

Way = Callable[[], Any]


class NoLauncher:
    """Replaces ``launcher.Launcher`` in a dry run; does nothing."""

    tensors = ("a", "b", "bias", "d")

    def __call__(self, pointers: tuple[int, ...], stream: int) -> None:
        pass

    def clone(self) -> NoLauncher:
        return self


class DryTorch(arrays.Torch):
    """CPU tensors, described as tensors on a GPU. ``abs`` costs as little as torch's raw stream."""

    def describe(self, array: Any) -> arrays.ArrayInfo:
        return dataclasses.replace(super().describe(array), device="cuda:0")

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Way:
        element = getattr(torch, dtype)
        return lambda: torch.empty(shape, dtype=element)

    def stream(self) -> Callable[[int], int]:
        return abs


def replace_gpu() -> None:
    """Replaces tensors, launcher and GPU for a dry run."""
    plain, nothing = DryTorch(), NoLauncher()
    arrays.torch = lambda: plain  # type: ignore[assignment]
    launcher.load = lambda *_, device, zeros: nothing  # type: ignore[assignment,return-value]
    c = SimpleNamespace(cuStreamIsCapturing=ctypes.CDLL(None).abs, cuLaunchKernelEx=None)
    cuda = driver.Driver(c)
    driver.opened = lambda: cuda  # type: ignore[assignment]
    operator._gpu = lambda index: gpu.SKUS["h200"]  # type: ignore[assignment]
    kernelcat.get("gemm")
    kernel = torch_operators._allocating_kernel(catalog.entry("gemm"), registry.pinned)
    LIBRARY.impl("gemm", kernel, "CPU")


def ways(dry: bool) -> dict[str, Way]:
    """Name -> a function that makes one call."""
    m, n, k = SHAPE
    place = "cpu" if dry else "cuda"
    a, b, d = (
        torch.zeros(shape, dtype=torch.bfloat16, device=place) for shape in ((m, k), (n, k), (m, n))
    )
    bias = torch.zeros(n, dtype=torch.bfloat16, device=place)
    why = kernelcat.get("gemm", language="cuda").explain(a, b)
    kernel = why.implementation
    # With a pinned configuration no call is a miss of the database; counting a miss takes 0.1 us.
    op = kernelcat.get("gemm", language="cuda", variant=kernel.variant, config=why.config)
    bound = op.bind(a, b, out=d)
    raw, pointers, stream = bound._launch, bound._pointers, bound._current(0)
    calls = {
        RAW: lambda: raw(pointers, stream),
        "bind()()": bound,
        "op(a, b, out=d)": lambda: op(a, b, out=d),
        RECORDED: lambda: op(a, b, out=d),
        "op(a, b, bias=bias, out=d)": lambda: op(a, b, bias=bias, out=d),
        OP: lambda: op(a, b),
        TORCH: lambda: torch.ops.kernelcat.gemm(a, b),
        "torch.empty": lambda: torch.empty((m, n), dtype=torch.bfloat16, device=place),
    }
    if not dry:
        transposed = b.t()
        calls["torch.mm(a, b, out=d)"] = lambda: torch.mm(a, transposed, out=d)
        calls[MM] = lambda: torch.mm(a, transposed)
        calls["cuda.core.launch"] = cuda_core()
    return calls


def cuda_core() -> Way:
    """A launch by cuda.core of an empty kernel with the same number of pointers."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    code = 'extern "C" __global__ void empty(void*, void*, void*, void*) {}'
    options = ProgramOptions(arch=f"sm_{device.arch}")
    kernel = Program(code, "c++", options).compile("cubin").get_kernel("empty")
    config, onto = LaunchConfig(grid=1, block=32), device.default_stream
    return lambda: launch(onto, config, kernel, 0, 0, 0, 0)


def microseconds(call: Way) -> float:
    """Host time of one call, as the mean of a block, after a first call."""
    call()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS / 1000


def measure(calls: dict[str, Way], blocks: int, wait: Way) -> dict[str, list[float]]:
    """Name -> microseconds of a call, one value for each block. ``wait`` waits for the GPU."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(blocks):
        random.shuffle(names)
        for name in names:
            wait()
            with recorder(name):
                samples[name].append(microseconds(calls[name]))
    return samples


@contextmanager
def recorder(name: str) -> Iterator[None]:
    """Records the calls of the block if ``name`` says so."""
    if name != RECORDED:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, kernelcat.record(f"{folder}/workload.jsonl"):
        yield


def report(samples: dict[str, list[float]], dry: bool) -> dict[str, Any]:
    rows = {}
    for name, values in samples.items():
        over = [value - raw for value, raw in zip(values, samples[RAW], strict=True)]
        rows[name] = {"us": statistics.median(values), "over_raw_us": statistics.median(over)}
    limits = {}
    for (name, other), limit in (DRY_LIMITS_US if dry else LIMITS_US).items():
        over = statistics.median(map(sub, samples[name], samples[other]))
        limits[f"{name} over {other}"] = {
            "limit_us": limit, "over_us": over, "kept": over <= limit,
        }  # fmt: skip
    where = "no GPU (dry run)" if dry else torch.cuda.get_device_name()
    return {
        "where": where,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "shape": dict(zip("MNK", SHAPE, strict=True)),
        "kernel": "none: a launcher that does nothing" if dry else kernel_name(),
        "rows": rows,
        "limits": limits,
    }


def kernel_name() -> str:
    m, n, k = SHAPE
    op = kernelcat.get("gemm", language="cuda")
    return op.explain(M=m, N=n, K=k, dtype="bfloat16", bias=False).implementation.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="without a GPU: the Python path alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--blocks", type=int, default=300)
    arguments = parser.parse_args()
    if arguments.dry:
        replace_gpu()
    wait = (lambda: None) if arguments.dry else torch.cuda.synchronize
    result = report(measure(ways(arguments.dry), arguments.blocks, wait), arguments.dry)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0 if all(limit["kept"] for limit in result["limits"].values()) else 1


def show(result: dict[str, Any]) -> None:
    print(f"{result['where']}, Python {result['python']}, torch {result['torch']}")
    print(f"kernel: {result['kernel']}\n")
    print(f"{'':32}{'us a call':>10}{'over raw':>10}")
    for name, row in result["rows"].items():
        print(f"{name:32}{row['us']:10.2f}{row['over_raw_us']:10.2f}")
    print()
    for name, limit in result["limits"].items():
        verdict = "kept" if limit["kept"] else "BROKEN"
        print(f"{name}: {limit['over_us']:.2f} us, at most {limit['limit_us']:.0f}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
