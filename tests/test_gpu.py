"""The table of GPUs, the names of a GPU, and the facts that the driver corrects."""

from __future__ import annotations

import pytest

from kernelcat.errors import UnknownName
from kernelcat.runtime import gpu
from kernelcat.runtime.driver import Facts, split_mig


@pytest.mark.parametrize(
    ("name", "sku"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA GH200 144G HBM3e", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("nvidia geforce rtx 5090", "rtx5090"),
        (" H200 ", "h200"),
    ],
)
def test_names_of_the_driver_are_found_in_the_table(name: str, sku: str) -> None:
    assert gpu.find(name).sku == sku


@pytest.mark.parametrize("name", ["h20o", "h2000", "xh200"])
def test_an_unknown_gpu_names_the_nearest(name: str) -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*h200"):
        gpu.find(name)


def test_a_laptop_chip_is_not_its_desktop_namesake() -> None:
    with pytest.raises(UnknownName):
        gpu.find("NVIDIA GeForce RTX 4090 Laptop GPU")


@pytest.mark.parametrize("row", gpu.SKUS.values(), ids=gpu.SKUS)
def test_rooflines_are_plausible(row: gpu.Gpu) -> None:
    ridge = row.flops["bfloat16"] / row.bandwidth
    assert 100 < ridge < 500, "operations a byte at the ridge"
    assert row.roofline_us(0, int(row.bandwidth), "bfloat16") == pytest.approx(1e6)
    assert row.roofline_us(int(row.flops["bfloat16"]), 1, "bfloat16") == pytest.approx(1e6)


def facts(**changes: object) -> Facts:
    h200 = {
        "name": "NVIDIA H200",
        "capability": (9, 0),
        "sms": 132,
        "shared_bytes": 232448,
        "l2_bytes": 60 << 20,
        "memory_bytes": 150 << 30,
        "bandwidth": 4.8e12,
        "clock_hz": 1.98e9,
    }
    return Facts(**{**h200, **changes})


def test_a_power_cap_and_the_true_memory_are_taken_from_the_driver() -> None:
    adjusted = gpu.adjust(facts(power_w=500))
    assert (adjusted.sku, adjusted.power_w, adjusted.memory_bytes) == ("h200", 500, 150 << 30)


def test_a_mig_slice_is_a_separate_sku_with_a_part_of_the_bandwidth_and_flops() -> None:
    assert split_mig("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == ("NVIDIA H100 80GB HBM3", "1g.10gb")
    whole = gpu.find("h100")
    adjusted = gpu.adjust(
        facts(name="NVIDIA H100 80GB HBM3", mig="1g.10gb", sms=16, memory_bytes=10 << 30)
    )
    assert adjusted.sku == "h100-mig-1g.10gb" and adjusted.arch == "sm_90a"
    assert adjusted.bandwidth == pytest.approx(whole.bandwidth / 8)
    assert adjusted.flops["bfloat16"] == pytest.approx(whole.flops["bfloat16"] * 16 / 132)


def test_a_gpu_outside_the_table_gets_a_row_from_its_attributes() -> None:
    adjusted = gpu.adjust(facts(name="NVIDIA RTX 6000 Ada Generation", capability=(8, 9)))
    assert adjusted.sku == "rtx-6000-ada-generation" and adjusted.arch == "sm_89"
    assert adjusted.bandwidth == 4.8e12


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_detected() -> None:
    detected = gpu.detect()
    assert detected.sms > 0 and detected.memory_bytes > 0 and detected.bandwidth > 1e11


def test_a_type_without_a_listed_rate_is_bounded_by_the_fastest_rate() -> None:
    """Hopper computes 4-bit products in another type: the roofline must not exceed any of them."""
    h200, b200 = gpu.find("h200"), gpu.find("b200")
    assert h200.roofline_us(10**12, 0, "float4_e2m1fn_x2") == pytest.approx(1e6 / 1978.9)
    assert b200.roofline_us(10**12, 0, "float4_e2m1fn_x2") == pytest.approx(1e6 / 9000)
