"""What a call costs on the host: ``python tests/host_cost.py [--dry] [--json]``.

Microseconds of host time a call, of the same small gemm kernel called in several ways: the raw
launcher, ``bind()``, ``op(a, b, out=d)``, ``op(a, b)``, beside torch's and cuda.core's launches.
The ways take turns in short blocks, in random order, so that all see the same machine; the
figure is the median over the blocks, and differences are medians of differences block by block.
The GPU is idle between blocks, so no block waits for it: the queue never fills.

The two limits are those of the project: ``op(..., out=)`` at most 3 us over the raw launcher,
``bind()`` at most 1 us over it. The exit status is 1 when one is broken.

``--dry`` needs no GPU: a launcher that does nothing stands in for the real one, and CPU tensors
for CUDA ones. It measures the Python path alone; its figures are not those of a GPU machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kernelcat
from kernelcat.call import arrays, operator
from kernelcat.runtime import gpu, launcher

SHAPE = (128, 128, 128)
CALLS = 200
"""A block: short enough that the launch queue (1024 deep) never fills."""

LIMITS_US = {"op(a, b, out=d)": 3.0, "bind()()": 1.0}
RAW = "launcher(pointers, stream)"

Way = Callable[[], Any]


class Nothing:
    """Stands in for ``launcher.Launcher`` in a dry run."""

    tensors = ("a", "b", "bias", "d")

    def __call__(self, pointers: tuple[int, ...], stream: int) -> None:
        pass

    def clone(self) -> Nothing:
        return self


class DryTorch(arrays.Torch):
    """CPU tensors that claim to lie on a GPU; torch's raw stream is a function as cheap."""

    def describe(self, array: Any) -> arrays.ArrayInfo:
        return dataclasses.replace(super().describe(array), device="cuda:0")

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Way:
        element = getattr(torch, dtype)
        return lambda: torch.empty(shape, dtype=element)

    def stream(self) -> Callable[[int], int]:
        return abs


def stand_in() -> None:
    plain, nothing = DryTorch(), Nothing()
    arrays.torch = lambda: plain  # type: ignore[assignment]
    launcher.load = lambda *_: nothing  # type: ignore[assignment,return-value]
    operator._gpu = lambda index: gpu.SKUS["h200"]  # type: ignore[assignment]


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
    # Pinned, so that it is no miss: counting those costs 0.1 us a call.
    op = kernelcat.get("gemm", language="cuda", variant=kernel.variant, config=why.config)
    bound = op.bind(a, b, out=d)
    raw, pointers, stream = bound._launch, bound._pointers, bound._current(0)
    found = {
        RAW: lambda: raw(pointers, stream),
        "bind()()": bound,
        "op(a, b, out=d)": lambda: op(a, b, out=d),
        "op(a, b, bias=bias, out=d)": lambda: op(a, b, bias=bias, out=d),
        "op(a, b)": lambda: op(a, b),
        "torch.empty": lambda: torch.empty((m, n), dtype=torch.bfloat16, device=place),
    }
    if not dry:
        transposed = b.t()
        found["torch.mm(a, b, out=d)"] = lambda: torch.mm(a, transposed, out=d)
        found["torch.mm(a, b)"] = lambda: torch.mm(a, transposed)
        found["torch.ops.kernelcat.gemm"] = lambda: torch.ops.kernelcat.gemm(a, b)
        found["cuda.core.launch"] = cuda_core()
    return found


def cuda_core() -> Way:
    """cuda.core's launch of an empty kernel that takes as many pointers."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    code = 'extern "C" __global__ void empty(void*, void*, void*, void*) {}'
    options = ProgramOptions(arch=f"sm_{device.arch}")
    kernel = Program(code, "c++", options).compile("cubin").get_kernel("empty")
    config, onto = LaunchConfig(grid=1, block=32), device.default_stream
    return lambda: launch(onto, config, kernel, 0, 0, 0, 0)


def microseconds(call: Way) -> float:
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS / 1000


def measure(found: dict[str, Way], blocks: int, wait: Way) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in found}
    for call in found.values():
        microseconds(call)
    names = list(found)
    for _ in range(blocks):
        random.shuffle(names)
        for name in names:
            wait()
            samples[name].append(microseconds(found[name]))
    return samples


def report(samples: dict[str, list[float]], dry: bool) -> dict[str, Any]:
    rows = {}
    for name, values in samples.items():
        over = [value - raw for value, raw in zip(values, samples[RAW], strict=True)]
        rows[name] = {"us": statistics.median(values), "over_raw_us": statistics.median(over)}
    limits = {
        name: {"limit_us": limit, "over_raw_us": rows[name]["over_raw_us"],
               "kept": rows[name]["over_raw_us"] <= limit}
        for name, limit in LIMITS_US.items()
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
    asked = parser.parse_args()
    if asked.dry:
        stand_in()
    wait = (lambda: None) if asked.dry else torch.cuda.synchronize
    result = report(measure(ways(asked.dry), asked.blocks, wait), asked.dry)
    if asked.json:
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
        over, most = limit["over_raw_us"], limit["limit_us"]
        print(f"{name}: {over:.2f} us over the raw launch, at most {most:.0f}: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
