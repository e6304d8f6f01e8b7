"""The GPUs kernelcat knows: rooflines, architectures, aliases, and which one is in this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kernelcat.errors import UnknownName, nearest
from kernelcat.runtime import driver

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One SKU, from the vendor's datasheet; :func:`detect` replaces what the driver knows better.

    Attributes
    ----------
    sku : short name used by the command line and the database (``h200``)
    arch : the target kernels are compiled for (``sm_90a``)
    sms : streaming multiprocessors
    shared_bytes : dynamic shared memory one block may use
    l2_bytes, memory_bytes : bytes
    bandwidth : peak DRAM bytes a second
    flops : element type -> dense peak operations a second
    power_w : default power limit
    mig : name of the MIG slice, or None for a whole GPU
    """

    sku: str
    name: str
    arch: str
    sms: int
    shared_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    power_w: int
    mig: str | None = None

    def roofline_us(self, flops: int, bytes_moved: int, dtype: str) -> float:
        """The least time for this work: the longer of arithmetic and memory, in microseconds."""
        # What the GPU has no rate for is computed as another type: any of them is a floor.
        rate = self.flops.get(dtype) or max(self.flops.values())
        return max(flops / rate, bytes_moved / self.bandwidth) * 1e6


def _peaks(bf16: float, fp32: float, fp8: float = 0, fp4: float = 0) -> dict[str, float]:
    """Dense peaks, given in TFLOP/s."""
    peaks = {"bfloat16": bf16, "float16": bf16, "float32": fp32}
    peaks |= {"float8_e4m3fn": fp8} if fp8 else {}
    peaks |= {"float4_e2m1fn_x2": fp4} if fp4 else {}
    return {dtype: rate * TERA for dtype, rate in peaks.items()}


_HOPPER = _peaks(989.4, 66.9, 1978.9)
_BLACKWELL = _peaks(2250, 75, 4500, 9000)

SKUS: dict[str, Gpu] = {
    gpu.sku: gpu
    for gpu in (
        Gpu("a100", "NVIDIA A100 80GB SXM4", "sm_80", 108, 163 * KB, 40 * MB, 80 * GB, 2.039e12,
            _peaks(312, 19.5), 400),
        Gpu("h100", "NVIDIA H100 SXM5", "sm_90a", 132, 227 * KB, 50 * MB, 80 * GB, 3.352e12,
            _HOPPER, 700),
        Gpu("h100-pcie", "NVIDIA H100 PCIe", "sm_90a", 114, 227 * KB, 50 * MB, 80 * GB, 2.039e12,
            _peaks(756, 51, 1513), 350),
        Gpu("h100-nvl", "NVIDIA H100 NVL", "sm_90a", 132, 227 * KB, 50 * MB, 94 * GB, 3.938e12,
            _peaks(835, 60, 1671), 400),
        Gpu("h200", "NVIDIA H200", "sm_90a", 132, 227 * KB, 60 * MB, 141 * GB, 4.8e12, _HOPPER,
            700),
        Gpu("b200", "NVIDIA B200", "sm_100a", 148, 227 * KB, 126 * MB, 180 * GB, 8.0e12,
            _BLACKWELL, 1000),
        Gpu("gb200", "NVIDIA GB200", "sm_100a", 152, 227 * KB, 126 * MB, 186 * GB, 8.0e12,
            _peaks(2500, 80, 5000, 10000), 1200),
        Gpu("b300", "NVIDIA B300", "sm_103a", 160, 227 * KB, 126 * MB, 288 * GB, 8.0e12,
            _peaks(2500, 77, 5000, 15000), 1400),
        Gpu("l40s", "NVIDIA L40S", "sm_89", 142, 99 * KB, 96 * MB, 48 * GB, 0.864e12,
            _peaks(362, 91.6, 733), 350),
        Gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", 128, 99 * KB, 72 * MB, 24 * GB,
            1.008e12, _peaks(165.2, 82.6, 330.3), 450),
        Gpu("rtx5090", "NVIDIA GeForce RTX 5090", "sm_120a", 170, 99 * KB, 96 * MB, 32 * GB,
            1.792e12, _peaks(209.5, 104.8, 419, 1676), 575),
    )
}  # fmt: skip

_PATTERNS = (
    (r"LAPTOP|MAX Q", None),
    (r"GH200 .*144G", "h200"),
    (r"GH200", "h100"),
    (r"H200", "h200"),
    (r"H100 .*NVL", "h100-nvl"),
    (r"H100 .*PCIE", "h100-pcie"),
    (r"H100", "h100"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"A100", "a100"),
    (r"L40S", "l40s"),
    (r"(RTX ?)?4090", "rtx4090"),
    (r"(RTX ?)?5090", "rtx5090"),
)
"""Whole words in capitals; the first match wins, and None is a chip that is not in the table."""


def find(name: str) -> Gpu:
    """The SKU a person or a driver calls ``name`` (``h200``, ``NVIDIA H100 80GB HBM3``).

    Raises
    ------
    UnknownName
        With the nearest names.
    """
    key = name.strip().lower()
    if key in SKUS:
        return SKUS[key]
    words = re.sub(r"[\s_-]+", " ", name).upper()
    matched = (sku for pattern, sku in _PATTERNS if re.search(rf"\b({pattern})\b", words))
    sku = next(matched, None)
    if sku is not None:
        return SKUS[sku]
    raise UnknownName(f"unknown GPU {name!r}{nearest(key, list(SKUS))}")


def detect(index: int = 0) -> Gpu:
    """The GPU ``index`` of this machine, corrected by what the driver reports.

    A MIG slice and a lowered power limit scale the roofline of the SKU: a slice by its share of
    SMs and memory, arithmetic by nothing else (the power limit is recorded, not modelled).

    Raises
    ------
    MissingDependency
        Where there is no driver or no such GPU; one line that says what to do.
    """
    facts = driver.facts(index)
    return adjust(facts)


def adjust(facts: driver.Facts) -> Gpu:
    """The SKU row for a GPU as its driver describes it; a generic row for one not in the table."""
    try:
        sku = find(facts.name)
    except UnknownName:
        sku = _generic(facts)
    if facts.mig is None:
        return replace(
            sku,
            name=facts.name,
            sms=facts.sms,
            memory_bytes=facts.memory_bytes,
            power_w=facts.power_w or sku.power_w,
        )
    compute, memory = facts.sms / sku.sms, min(1.0, facts.memory_bytes / sku.memory_bytes)
    return replace(
        sku,
        sku=f"{sku.sku}-mig-{facts.mig}",
        name=f"{facts.name} MIG {facts.mig}",
        mig=facts.mig,
        sms=facts.sms,
        memory_bytes=facts.memory_bytes,
        l2_bytes=facts.l2_bytes or sku.l2_bytes,
        bandwidth=sku.bandwidth * memory,
        flops={dtype: rate * compute for dtype, rate in sku.flops.items()},
        power_w=facts.power_w or sku.power_w,
    )


def _generic(facts: driver.Facts) -> Gpu:
    """A row from driver attributes alone; its roofline is the memory clock times the bus width."""
    major, minor = facts.capability
    suffix = "a" if major >= 9 else ""
    per_clock = {8: 2048, 9: 4096, 10: 8192, 12: 2048}.get(major, 1024)
    tensor = facts.sms * facts.clock_hz * per_clock
    return Gpu(
        sku=re.sub(r"[^a-z0-9]+", "-", facts.name.lower().removeprefix("nvidia ")).strip("-"),
        name=facts.name,
        arch=f"sm_{major}{minor}{suffix}",
        sms=facts.sms,
        shared_bytes=facts.shared_bytes,
        l2_bytes=facts.l2_bytes,
        memory_bytes=facts.memory_bytes,
        bandwidth=facts.bandwidth,
        flops={
            "bfloat16": tensor,
            "float16": tensor,
            "float32": facts.sms * facts.clock_hz * 256.0,
        },
        power_w=facts.power_w or 0,
    )
