"""`nvfp4_matmul/cuda/boxes` on the host: tiles that leave while the next one is multiplied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_fibers
import numpy as np
import pytest

from kernelcat import catalog, dtypes
from kernelcat.catalog.implementation import Config
from kernelcat.catalog.spec import Entry, Problem
from kernelcat.reference._fp4_tiles import pack_scales
from kernelcat.reference.nvfp4_matmul import ENTRY, product
from kernelcat.verify import gate

BOXES = catalog.implementation("nvfp4_matmul", "cuda", "boxes")
CASES = {
    "more tiles than stages": (product(300, 400, 128, packing="tiles"), "128x64", 1),
    "rows and columns end within boxes": (
        product(150, 328, 400, packing="tiles", bias=True),
        "128x80",
        3,
    ),
    "columns of the second consumer are outside": (
        product(70, 192, 640, packing="tiles", format="mxfp4"),
        "128x64",
        1,
    ),
    "MXFP4 becomes float16": (
        product(70, 192, 640, packing="tiles", format="mxfp4", dtype="float16"),
        "128x64",
        1,
    ),
    "activation": (
        product(90, 136, 272, packing="tiles", activation="gelu", bias=True),
        "128x96",
        2,
    ),
    "rows of float8": (product(90, 136, 272, packing="tiles", dtype="float8_e4m3fn"), "128x96", 2),
}


def verdict(problem: Problem, tile: str, sms: int, entry: Entry = ENTRY) -> Any:
    host = cuda_fibers.Host(max_blocks=sms, sms=sms)
    config = Config(tile=tile)
    assert BOXES.why_not(config, problem, host.gpu) is None
    return gate.prepare(entry, problem, host).verify(host.load(BOXES, problem, config))


@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_kernel_is_right_on_the_host(case: tuple[Problem, str, int]) -> None:
    found = verdict(*case)
    assert found.passed, found.detail


def small_weights(problem: Problem, normal: Any) -> dict[str, Any]:
    """A large A and rows of W with scales from 2^-30 to 2^-7."""
    inputs = ENTRY.make_inputs(problem, normal)
    n, blocks = problem["N"], problem["K"] // 32
    scales = (97 + np.arange(n) % 24).astype("uint8").repeat(blocks).reshape(n, blocks)
    inputs["a"] *= 2.0**13
    inputs["w_scale"] = dtypes.decode(pack_scales(scales, "mxfp4"), "float8_e8m0fnu")
    return inputs


@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
def test_weights_below_the_normal_range_of_float16_are_rounded_once() -> None:
    problem = product(70, 192, 640, packing="tiles", format="mxfp4", dtype="float16")
    found = verdict(problem, "128x64", 1, replace(ENTRY, make_inputs=small_weights, signal=None))
    assert found.passed, found.detail


DECODE = "packed.tiles[t].decode_into(operands[t]);"
LATE = f"if (threadIdx.x >= 128) for (int i = 0; i < 100; ++i) __syncwarp();\n      {DECODE}"
FAULTS = {
    "a consumer writes what the other one, which is late, still multiplies": (
        ("wgmma", DECODE, LATE),
        ("boxes", "named_barrier_sync(1, Config::kNumConsumers * kWarpgroupThreads);", ""),
    ),
    "the producer gets a stage back while a tile leaves through it": (
        (
            "wgmma",
            "  pin(sums);\n",
            "  pin(sums);\n  release_stage_after_loads(shared.empty[previous]);\n",
        ),
    ),
    "the stage of the tile before is never given back": (
        ("boxes", "release_stage_after_loads(shared.empty[stage]);", ""),
    ),
}  # fmt: skip


@pytest.mark.skipif(cuda_fibers.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: Any, tmp_path: Path) -> None:
    for number, (name, old, new) in enumerate(fault):
        folder = tmp_path / str(number)
        folder.mkdir()
        cuda_fibers.plant(monkeypatch, folder, f"nvfp4_matmul/{name}.cu", old, new)
    try:
        found = verdict(*CASES["more tiles than stages"])
    except AssertionError as error:
        assert "hangs" in str(error)
    else:
        assert not found.passed
