"""Quantizers run at the bandwidth of a copy of equally many bytes, measured with a cold L2."""

from __future__ import annotations

from statistics import median

import pytest

from kernelcat import catalog
from kernelcat.bench import STATES, Contestant, CudaTimer, copies_needed, race
from kernelcat.catalog.spec import Problem
from kernelcat.runtime import telemetry
from kernelcat.runtime.device import CudaDevice
from kernelcat.runtime.gpu import GB
from kernelcat.verify import gate

pytestmark = pytest.mark.gpu

SHARE = 0.85
SHORT = {"8192x7168-nvfp4-rms": 0.79}
"""What is below it, and why: docs/measured.md."""
LARGE = [
    ("nvfp4_quantize", "8192x8192-nvfp4"),
    ("nvfp4_quantize", "8192x8192-mxfp4"),
    ("nvfp4_quantize", "8192x8192-nvfp4-swizzled"),
    ("nvfp4_quantize", "8192x8192-nvfp4-training"),
    ("nvfp4_quantize", "8192x7168-nvfp4-rms"),
    ("nvfp4_dequantize", "7168x18432-nvfp4"),
    ("nvfp4_dequantize", "7168x18432-mxfp4"),
    ("nvfp4_dequantize", "7168x18432-nvfp4-swizzled"),
]


def contestants_of(
    name: str, problem: Problem, device: CudaDevice, timer: CudaTimer
) -> dict[str, Contestant]:
    """Every configuration of `vectorized`, over rotating copies of the arrays."""
    entry = catalog.entry(name)
    implementation = catalog.implementation(name, "cuda", "vectorized")
    moved = entry.bytes_moved(problem)
    copies = copies_needed(moved, moved, device.gpu.l2_bytes, 20 * GB)
    sets = gate.allocate(entry, problem, device, 0, copies)
    contestants = {}
    for config in implementation.configs(problem, device.gpu):
        bind = device.load(implementation, problem, config)
        timed = timer.prepare([bind(arrays) for arrays in sets], "graph")
        contestants[f"{name} {config}"] = Contestant(timed)
    return contestants


@pytest.mark.parametrize(("name", "problem_name"), LARGE)
def test_a_quantizer_runs_at_the_bandwidth_of_a_copy(name: str, problem_name: str) -> None:
    device = CudaDevice(0)
    timer, entry = CudaTimer(device), catalog.entry(name)
    problem = entry.named(problem_name)
    cols = entry.bytes_moved(problem) // 4  # of 16 bits, read and written
    copy = Problem.of(
        "tma_copy", rows=1, cols=cols, src_stride=cols, dst_stride=cols, dtype="bfloat16"
    )
    copies, own = (
        contestants_of(*each, device, timer) for each in (("tma_copy", copy), (name, problem))
    )
    race(copies | own, telemetry.NoTelemetry(), STATES["burst"], blocks=8)
    (whole, _), (best, config) = (
        min((median(lane.samples), key) for key, lane in contestants.items())
        for contestants in (copies, own)
    )
    print(f"{problem_name}: {config} {best:.2f} us, copy {whole:.2f}")
    assert whole / best >= SHORT.get(problem_name, SHARE)
