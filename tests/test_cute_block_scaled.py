"""`nvfp4_matmul`'s block-scaled CuTe kernel: its scales' way in NumPy, what compilers make of it.

Nothing here runs the kernel. The way of the scales is taken from the kernel's own layouts and
computed on the host with what TMA and PTX say of their instructions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from campaign import RUNS_ALL

pytest.importorskip("cutlass")

from kernelcat import catalog, jit
from kernelcat.catalog.implementation import Config
from kernelcat.reference._epilogue import ACTIVATIONS
from kernelcat.reference._fp4 import BLOCKS, swizzle
from kernelcat.reference.nvfp4_matmul import FP4, FP8, product
from kernelcat.runtime import gpu
from kernelcat.verify import inspect

B200 = gpu.find("b200")
BLOCK_SCALED = catalog.implementation("nvfp4_matmul", "cute", "block_scaled")
TILES = ((256, 2), (128, 2), (256, 1), (128, 1), (64, 1))
"""block_n, ctas."""
M, N, K = 300, 456, 608


@dataclass
class Way:
    """One operand's scales, as the kernel's layouts have them.

    Attributes
    ----------
    stored : pair of scales -> its place in global memory, by (pair, atom along K, along the rows)
    stages : pair of scales -> its place in shared memory, by the same and the stage
    copies : ``tcgen05.cp`` of stage 1: 16-byte unit in shared memory -> column of tensor memory
    blocks : of the products of 64 columns of K: first column and first byte of the scales
    """

    stored: Any = None
    box: tuple[int, ...] = ()
    stages: Any = None
    copies: dict[int, int] = field(default_factory=dict)
    blocks: list[tuple[int, int]] = field(default_factory=list)


@cache
def kernel_of(format: str, block_n: int, ctas: int) -> Any:
    from kernelcat.kernels.cute.nvfp4_matmul.block_scaled import BlockScaled

    return BlockScaled("bfloat16", format == "nvfp4", False, "none", block_n, ctas)


@cache
def ways(format: str, block_n: int, ctas: int) -> tuple[Way, Way]:
    """A's and W's, evaluated while the DSL traces."""
    import cutlass
    import cutlass.cute as cute
    from cuda.bindings.driver import CUstream
    from cutlass.cute.runtime import make_ptr

    from kernelcat.kernels.cute.common import scale_atoms
    from kernelcat.kernels.cute.nvfp4_matmul import scales

    kernel, found = kernel_of(format, block_n, ctas), (Way(), Way())

    def evaluate(pointer: Any) -> None:
        a_layout, ta_layout, w_layout, tw_layout = kernel.scale_layouts(kernel.products())
        for way, rows, atoms, s_layout, t_layout in (
            (found[0], M, 1, a_layout, ta_layout),
            (found[1], N, kernel.atoms_n, w_layout, tw_layout),
        ):
            way.stored = places(scales.stored(pointer, rows, K, kernel.size).layout)
            stages = scales.stages_of(kernel.atoms_k, atoms, kernel.num_stages)
            way.box, way.stages = stages.shape[:3], places(stages)
            smem, tmem = cutlass.AddressSpace.smem, cutlass.AddressSpace.tmem
            kind = kernel.scale_type
            sS = cute.make_tensor(cute.make_ptr(kind, 0, smem, assumed_align=1024), s_layout)
            tS = cute.make_tensor(cute.make_ptr(kind, 0, tmem, assumed_align=16), t_layout)
            _, source, target = scale_atoms.to_tensor_memory(kernel.group, sS, tS)
            for r in range(cute.size(target, mode=[1])):
                for block in range(cute.size(target, mode=[3])):
                    unit = cute.crd2idx((0, r, 0, block, 1), source.layout)
                    way.copies[unit] = cute.crd2idx((0, r, 0, block), target.layout) // 4
            for block in range(4):
                way.blocks.append(divmod(cute.crd2idx((0, 0, block), t_layout), 4))

    def places(layout: Any) -> np.ndarray:
        return sum(
            at * step for at, step in zip(np.indices(layout.shape), layout.stride, strict=True)
        )

    @cute.jit
    def trace(pointer, stream):
        evaluate(pointer)

    pointer = make_ptr(cutlass.Uint8, 16, cutlass.AddressSpace.gmem, assumed_align=16)
    cute.compile(trace, pointer, CUstream(0), options="--gpu-arch sm_100a")
    return found


def load(way: Way, memory: np.ndarray, k_idx: int, row_idx: int, stage: int) -> np.ndarray:
    """Shared memory after TMA loaded a box from ``memory``; outside of it are zeros."""
    pairs, shared = memory.view("uint16"), np.full(2**17, 0xAAAA, "uint16")
    for at in np.ndindex(*way.box):
        p, i, r = at[0], at[1] + k_idx * way.box[1], at[2] + row_idx * way.box[2]
        is_inside = i < way.stored.shape[1] and r < way.stored.shape[2]
        shared[way.stages[(*at, stage)]] = pairs[way.stored[p, i, r]] if is_inside else 0
    return shared.view("uint8")


def to_tensor_memory(way: Way, shared: np.ndarray) -> np.ndarray:
    """(lanes, columns, 4) after ``tcgen05.cp.32x128b.warpx4``: 16 bytes a lane, in each quarter."""
    tensor = np.full((128, 64, 4), 0xBB, "uint8")
    for unit, column in way.copies.items():
        atom = shared[16 * unit : 16 * unit + 512].reshape(32, 4, 4)
        tensor[:, column : column + 4] = np.tile(atom, (4, 1, 1))
    return tensor


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize(("block_n", "ctas"), TILES)
def test_products_find_the_scales_of_their_rows(format: str, block_n: int, ctas: int) -> None:
    """In every tile, edges included: scales are those that the entry's layout stores, or zeros."""
    from kernelcat.kernels.cute.nvfp4_matmul.scales import place_of

    size, rng = BLOCKS[format], np.random.default_rng(0)
    each = 64 // size  # scales of a row in a product
    for way, rows, tile, is_w in zip(
        ways(format, block_n, ctas), (M, N), (128, block_n), (False, True), strict=True
    ):
        linear = rng.integers(1, 256, (rows, K // size), dtype="uint8")
        memory = swizzle(linear).reshape(-1)
        padded = np.zeros((rows + 512, K // size + 64), "uint8")
        padded[:rows, : K // size] = linear
        for index in range(-(-rows // tile)):
            row_idx, shift = place_of(index, block_n) if is_w else (index, 0)
            for k_idx in range(-(-K // 256)):
                tensor = to_tensor_memory(way, load(way, memory, k_idx, row_idx, 1))
                for block, (column, byte) in enumerate(way.blocks):
                    row, col = np.arange(tile), k_idx * (256 // size) + block * each
                    for quarter in range(4):
                        lane = row % 32 + 32 * quarter
                        read = tensor[lane, column + shift + row // 32, byte : byte + each]
                        wanted = padded[index * tile + row, col : col + each]
                        assert (read == wanted).all(), (is_w, index, k_idx, block)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize(("block_n", "ctas"), TILES)
def test_what_is_in_tensor_memory_is_apart_or_read_in_time(format, block_n, ctas) -> None:
    kernel, (a, w) = kernel_of(format, block_n, ctas), ways(format, block_n, ctas)
    accumulators = [set(range(i * kernel.spread, i * kernel.spread + block_n)) for i in range(2)]
    scales = [
        {first + column + i for column in way.copies.values() for i in range(4)}
        for first, way in ((kernel.a_scale_column, a), (kernel.w_scale_column, w))
    ]
    assert not scales[0] & scales[1] and max(scales[0] | scales[1]) < 512
    assert not (accumulators[0] | accumulators[1]) & (scales[0] | scales[1])
    shared = accumulators[0] & accumulators[1]
    assert bool(shared) == bool(kernel.overlap)
    for index, own in enumerate(accumulators):
        first, parts = min(own), [kernel.part_of(i, index) for i in range(block_n // 32)]
        assert sorted(parts) == list(range(block_n // 32))
        early = {first + 32 * p + i for p in parts[: kernel.num_shared] for i in range(32)}
        assert early >= shared and (shared or early == own)


@pytest.mark.parametrize("format", BLOCKS)
@pytest.mark.parametrize(("block_n", "ctas"), TILES)
def test_stages_fit_into_shared_memory(format: str, block_n: int, ctas: int) -> None:
    kernel = kernel_of(format, block_n, ctas)
    codes = (128 + block_n // ctas) * 128
    scales = (128 + max(block_n, 128)) * 256 // BLOCKS[format]
    assert kernel.num_stages >= 4
    assert 1024 + kernel.num_stages * (codes + scales) <= B200.shared_bytes


# ---- compiled ------------------------------------------------------------------------------------


def compiled(problem: Any, arch: str = "sm_100a", **config: int) -> Any:
    chosen = Config(BLOCK_SCALED.default(problem, B200), **config)
    assert BLOCK_SCALED.why_not(chosen, problem, B200) is None
    (step,) = BLOCK_SCALED.program(problem, chosen, B200).steps
    assert len(step.source.params) == len(step.params)
    return jit.build(step.source, arch)


def reports_of_sound(artifacts: list[Any]) -> list[inspect.Report]:
    """The reports of ``artifacts``, each of which must prove every technique and not spill."""
    reports = inspect.inspect_all(artifacts)
    for artifact, report in zip(artifacts, reports, strict=True):
        proofs = inspect.proofs(BLOCK_SCALED, [report])
        assert all(proofs.values()), proofs
        assert artifact.metadata["spill_bytes"] == 0 and artifact.metadata["registers"] <= 255
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("format", BLOCKS)
def test_tiles_compile_without_spills(format: str) -> None:
    problem = product(8192, 8192, 8192, dtype=FP4, format=format)
    artifacts = [compiled(problem, block_n=block_n, ctas=ctas) for block_n, ctas in TILES]
    for (block_n, ctas), report in zip(TILES, reports_of_sound(artifacts), strict=True):
        opcodes = report.opcodes
        instruction = "UTCOMMA" + ".2CTA" * (ctas == 2) + ".4X" * (format == "nvfp4")
        assert opcodes[instruction] == 4, opcodes
        scales = 256 // BLOCKS[format] // 4 * (1 + max(1, block_n // 128))
        copies = [count for opcode, count in opcodes.items() if opcode.startswith("UTCCP")]
        assert sum(copies) == scales, "a copy for each atom of a stage"


WIDEST, NARROWEST = (256, 2), (64, 1)
EPILOGUES = [
    case for case in itertools.product(BLOCKS, (False, True), (WIDEST, NARROWEST))
    if RUNS_ALL or case in (("nvfp4", True, WIDEST), ("mxfp4", False, NARROWEST))
]  # fmt: skip
"""Format, whether there is a bias, and tile: without a campaign, each value once."""


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue_compiles_without_spills(activation: str) -> None:
    artifacts = []
    for format, bias, (block_n, ctas) in EPILOGUES:
        axes = {"dtype": FP4, "format": format, "bias": bias, "activation": activation}
        artifacts.append(compiled(product(1000, 336, 96, **axes), block_n=block_n, ctas=ctas))
    reports_of_sound(artifacts)


SERVED = (product(1, 8, 32, dtype=FP4), product(0, 8, 32, dtype=FP4), product(8, 0, 32, dtype=FP4))
REJECTED = {
    "A in 4 bits": product(64, 64, 64),
    "take A in 4 bits": product(64, 64, 64, dtype=FP8),
    "W in rows": product(64, 64, 64, dtype=FP4, packing="tiles"),
    "K=48": product(64, 64, 48, dtype=FP4),
    "K=0": product(64, 64, 0, dtype=FP4),
    "N=12": product(64, 12, 64, dtype=FP4),
    "N=24 must be a multiple of 16": product(64, 24, 64, dtype=FP4, activation="swiglu"),
}


@pytest.mark.parametrize("problem", SERVED, ids=str)
def test_edges_are_served(problem: Any) -> None:
    config = BLOCK_SCALED.default(problem, B200)
    assert BLOCK_SCALED.why_not(config, problem, B200) is None
    steps = BLOCK_SCALED.program(problem, config, B200).steps
    assert len(steps) == (problem["M"] * problem["N"] > 0)


@pytest.mark.parametrize("reason", REJECTED)
def test_what_is_not_served_says_why(reason: str) -> None:
    problem = REJECTED[reason]
    config = BLOCK_SCALED.default(problem, B200)
    assert reason in str(BLOCK_SCALED.why_not(config, problem, B200))


@pytest.mark.parametrize("m", (1, 64, 128, 129, 300, 8192))
def test_grids_are_whole_pairs_and_few_rows_spread(m: int) -> None:
    problem = product(m, 8192, 8192, dtype=FP4)
    for config in BLOCK_SCALED.configs(problem, B200):
        (step,) = BLOCK_SCALED.program(problem, config, B200).steps
        assert 0 < step.grid[0] <= B200.sms and step.grid[0] % config["ctas"] == 0
        assert step.cluster == (config["ctas"], 1, 1)
    if m <= 128:
        assert BLOCK_SCALED.default(problem, B200)["block_n"] == 64
