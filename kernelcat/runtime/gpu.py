"""Known GPUs: architectures, peak rates and names; and the detection of this machine's GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log

from kernelcat.errors import UnknownName, nearest, short
from kernelcat.runtime import driver

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One SKU as in the vendor's datasheet; :func:`detect` replaces what the driver reports.

    Attributes
    ----------
    sku : short name on the command line and in the database (``h200``)
    arch : the architecture that kernels are compiled for (``sm_90a``)
    sms : number of streaming multiprocessors
    shared_bytes : dynamic shared memory that one thread block may use, in bytes
    l2_bytes, memory_bytes : size of the L2 cache and of DRAM, in bytes
    bandwidth : peak DRAM bandwidth in bytes per second
    flops : element type -> peak dense operations per second
    power_w : default power limit in watts
    mig : profile of the MIG slice (``1g.10gb``), or None for a whole GPU
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
        """Lower bound of the time in microseconds: the longer of arithmetic and memory traffic.

        An element type without a rate is computed as another type, so the highest rate of any type
        still gives a lower bound.
        """
        rate = self.flops.get(dtype) or max(self.flops.values())
        return max(flops / rate, bytes_moved / self.bandwidth) * 1e6


def _peaks(bf16: float, fp32: float, fp8: float = 0, fp4: float = 0) -> dict[str, float]:
    """``Gpu.flops`` from dense peak rates in TFLOP/s; 0 for a type that the GPU does not have."""
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
"""(pattern of whole words in capitals, SKU or None for a GPU not in SKUS); first match counts."""


_TOGETHER = (
    re.compile(r"(?P<one>.+)x(?P<count>\d+)-(?P<link>nvlink|pcie|shared)"),
    re.compile(r"(?P<count>\d+) x (?P<one>.+), (?P<link>nvlink|pcie|shared)"),
)
"""The short and the long name of GPUs that compute together."""


def together(gpu: Gpu, count: int, link: str) -> Gpu:
    """``count`` GPUs like ``gpu`` that compute together: the row of one, by their own name.

    ``link`` is ``nvlink``, ``pcie``, or ``shared`` for one GPU that several ranks share. Results of
    entries of several ranks have the name, such as ``h200x2-nvlink``.
    """
    return replace(gpu, sku=f"{gpu.sku}x{count}-{link}", name=f"{count} x {gpu.name}, {link}")


def find(name: str) -> Gpu:
    """The SKU with this short name or driver's name (``h200``, ``NVIDIA H100 80GB HBM3``).

    ``h200x2-nvlink`` is the row of GPUs that compute together (:func:`together`).

    Raises
    ------
    UnknownName
        There is no such SKU; the message lists the nearest names.
    """
    if not isinstance(name, str):
        raise UnknownName(f"unknown GPU {short(name)}{nearest(name, list(SKUS))}")
    key = name.strip().lower()
    if key in SKUS:
        return SKUS[key]
    for pattern in _TOGETHER:
        named = pattern.fullmatch(key)
        if named is not None:
            return together(find(named["one"]), int(named["count"]), named["link"])
    words = re.sub(r"[\s_-]+", " ", name).upper()
    matched = (sku for pattern, sku in _PATTERNS if re.search(rf"\b({pattern})\b", words))
    sku = next(matched, None)
    if sku is not None:
        return SKUS[sku]
    raise UnknownName(f"unknown GPU {name!r}{nearest(key, list(SKUS))}")


def siblings(gpu: Gpu) -> list[Gpu]:
    """The other SKUs of the architecture of ``gpu``; first those with nearly its bandwidth."""
    found = [each for each in SKUS.values() if each.arch == gpu.arch and each.sku != gpu.sku]
    return sorted(found, key=lambda each: abs(log(each.bandwidth / gpu.bandwidth)))


def detect(index: int = 0) -> Gpu:
    """The GPU ``index`` of this machine: the SKU's row, corrected by what the driver reports.

    A MIG slice has the SKU's peak rates scaled by its fraction of SMs (arithmetic) and of memory
    (bandwidth). The power limit is recorded and does not scale anything.

    Raises
    ------
    MissingDependency
        There is no driver or no such GPU; the message is one line.
    """
    facts = driver.facts(index)
    return adjust(facts)


def adjust(facts: driver.Facts) -> Gpu:
    """The row for a GPU with these facts: its SKU's row corrected, or a generic row."""
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
    """A row from the driver's attributes alone, for a GPU that is not in the table.

    Arithmetic rates are estimates: operations per clock and SM by major compute capability.
    """
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
