"""The FP4 entries in Triton's interpreter, on edge cases; no GPU needed.

tests/test_interpreter.py tests random problems, tests/test_compiles.py the machine code.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from triton.runtime.interpreter import InterpreterBuilder

from kernelcat import catalog, jit
from kernelcat.reference.nvfp4_matmul import FP4, FP8, product
from kernelcat.reference.nvfp4_quantize import rows
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

H200 = gpu.find("h200")
ALL = {"rms_norm": True, "hadamard": True, "stochastic": True, "scale_layout": "swizzled"}
SPLIT = {"stages": 4, "split_k": 4}


def quantize(variant: str, m: int, k: int, format: str = "nvfp4", config=None, **options):
    problem = rows(m, k, format, **options)
    return (problem.entry, variant, config or {}, problem.values)


def dequantize(variant: str, m: int, k: int, config=None, **axes: str):
    return ("nvfp4_dequantize", variant, config or {}, {"M": m, "K": k, **axes})


def matmul(variant: str, m: int, n: int, k: int, config, **axes: str | bool):
    problem = product(m, n, k, **axes)
    return (problem.entry, variant, config, problem.values)


CASES = {
    "quantize, one block": quantize("naive", 1, 16),
    "quantize, a row that is no power of two, all options": quantize("naive", 3, 2880, **ALL),
    "quantize, padding of both axes": quantize(
        "tiled", 131, 208, config={"rows": 4, "cols": 128, "warps": 2}, scale_layout="swizzled"
    ),
    "quantize, mxfp4, past both edges": quantize(
        "tiled", 37, 160, "mxfp4", config={"rows": 16, "cols": 256, "warps": 8}
    ),
    "quantize, several rows normalized": quantize(
        "tiled", 9, 672, "mxfp4", config={"rows": 4, "cols": 128, "warps": 8}, rms_norm=True
    ),
    "quantize, random bits of a column in the middle": quantize(
        "tiled", 17, 1040, config={"rows": 4, "cols": 512, "warps": 4}, stochastic=True
    ),
    "dequantize, padding of both axes": dequantize(
        "tiled", 131, 208, {"rows": 4, "cols": 128, "warps": 2},
        format="nvfp4", scale_layout="swizzled", dtype="float32",
    ),
    "dequantize, mxfp4": dequantize("naive", 40, 1056, format="mxfp4", dtype="float16"),
    "matmul, tiles, ragged": matmul(
        "naive", 5, 70, 176, {"tile": "16x32x32"}, packing="tiles", bias=True, activation="gelu"
    ),
    "matmul, tiles, mxfp4": matmul(
        "naive", 20, 50, 160, {"tile": "32x64x32"}, packing="tiles", format="mxfp4"
    ),
    "matmul, both in 4 bits, ragged": matmul(
        "naive", 5, 70, 176, {"tile": "16x32x32"}, dtype=FP4, bias=True, activation="silu"
    ),
    "matmul, both in 4 bits, more than a tile of scales, mxfp4": matmul(
        "naive", 150, 140, 160, {"tile": "32x64x32"}, dtype=FP4, format="mxfp4"
    ),
    "matmul, both in 4 bits, weights in tiles": matmul(
        "naive", 20, 50, 160, {"tile": "32x64x32"}, dtype=FP4, packing="tiles"
    ),
    "matmul, scaled by tensor cores, nvfp4": matmul(
        "block_scaled", 150, 140, 416, {"tile": "128x128x256", "stages": 3}, dtype=FP4
    ),
    "matmul, scaled by tensor cores, mxfp4, two tiles of scales down": matmul(
        "block_scaled", 300, 72, 672, {"tile": "256x128x256", "stages": 2},
        dtype=FP4, format="mxfp4", activation="swiglu", bias=True,
    ),
    "matmul, scaled by tensor cores, two tiles of scales across": matmul(
        "block_scaled", 3, 390, 288, {"tile": "128x256x256", "stages": 2}, dtype=FP4
    ),
    "matmul, nothing to add up": matmul("naive", 3, 5, 0, {"tile": "16x32x32"}, bias=True),
    "matmul, split": matmul("tiled", 1, 130, 2080, {"tile": "16x128x128", **SPLIT}),
    "matmul, split unevenly, swiglu": matmul(
        "tiled", 9, 136, 1104, {"tile": "16x64x128", **SPLIT}, activation="swiglu", bias=True
    ),
    "matmul, float8, many rows": matmul(
        "tiled", 131, 70, 224, {"tile": "128x128x64", "stages": 3, "split_k": 1},
        dtype=FP8, format="mxfp4", activation="silu",
    ),
}  # fmt: skip


if not hasattr(InterpreterBuilder, "create_dot_scaled"):  # Triton before 3.9
    CASES = {name: case for name, case in CASES.items() if case[1] != "block_scaled"}


@pytest.fixture(scope="module")
def verdicts(interpreted) -> dict[str, list]:
    return interpreted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_right_at_its_edges(verdicts, name: str) -> None:
    reason, passed, detail = verdicts[name]
    assert reason is None
    assert passed, detail


@pytest.mark.parametrize(
    ("sku", "format", "patterns"),
    [
        ("b200", "nvfp4", ("UTCOMMA.4X", "UTCCP")),
        ("b200", "mxfp4", ("UTCOMMA", "UTCCP")),
        ("rtx5090", "nvfp4", ("OMMA.SF*E2M1.E2M1.UE4M3.4X",)),
        ("rtx5090", "mxfp4", ("OMMA.SF*E2M1.E2M1.E8",)),
    ],
)
def test_block_scaled_uses_block_scaled_tensor_core_instructions(
    sku: str, format: str, patterns
) -> None:
    """Tensor cores read codes without decoding; on B200, UTCCP copies scales to tensor memory."""
    target, problem = gpu.find(sku), product(4096, 4096, 4096, dtype=FP4, format=format)
    block_scaled = catalog.implementation("nvfp4_matmul", "triton", "block_scaled")
    (step,) = block_scaled.program(problem, block_scaled.default(problem, target), target).steps
    artifact = jit.build(step.source, target.arch)
    report = inspect.inspect(artifact)
    for pattern in (*patterns, "UTMALDG"):
        assert report.has(pattern), pattern
    assert report.spill_bytes == 0


@pytest.mark.parametrize("name", ["nvfp4_quantize", "nvfp4_dequantize", "nvfp4_matmul"])
def test_an_empty_problem_has_no_steps(name: str) -> None:
    entry = catalog.entry(name)
    named = next(iter(entry.problems.values()))
    problem = entry.problem(**{**named.values, "M": 0})
    for implementation in catalog.implementations(name):
        config = implementation.default(problem, H200)
        assert implementation.program(problem, config, H200).steps == ()


@pytest.mark.parametrize("name", ["nvfp4_quantize", "nvfp4_dequantize", "nvfp4_matmul"])
def test_a_tune_tries_at_most_40_configurations_of_each_implementation(name: str) -> None:
    for problem in catalog.entry(name).problems.values():
        min_configs = (
            1 if problem.values.get("packing") == "tiles" else 2
        )  # of packing=tiles only naive serves
        for target in (H200, gpu.find("b200")):
            num_configs = [
                sum(1 for _ in implementation.configs(problem, target))
                for implementation in catalog.in_language(name, "triton")
            ]
            assert max(num_configs) <= 40 and sum(num_configs) >= min_configs
